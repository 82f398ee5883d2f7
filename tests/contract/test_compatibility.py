"""Nobody who speaks yesterday's contracts is misunderstood: field numbers and names stay what they were."""

import shutil

BASELINE = "protos/baseline.binpb"


def test_the_contracts_break_nothing_of_the_baseline(buf):
    result = buf("breaking", "--against", BASELINE)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_baseline_knows_every_field_so_that_no_number_is_forgotten(contracts, baseline):
    known, present = _fields(baseline), _fields(contracts)
    assert not present - known, "refresh the baseline, see protos/README.md"


def test_a_reused_field_number_is_noticed(buf, root, tmp_path):
    _copy(root, tmp_path)
    contract = tmp_path / "protos/omniserve/vram/v1/vram.proto"
    text = contract.read_text()
    changed = text.replace("  bool released = 1;", "  string explanation = 1;")
    assert changed != text
    contract.write_text(changed)

    result = buf("breaking", "--against", str(root / BASELINE), cwd=tmp_path)

    assert result.returncode != 0
    assert "ReleaseResponse" in result.stdout


def test_a_new_field_breaks_nothing(buf, root, tmp_path):
    _copy(root, tmp_path)
    contract = tmp_path / "protos/omniserve/vram/v1/vram.proto"
    added = "  bool released = 1;\n  // Why not.\n  string explanation = 99;"
    contract.write_text(contract.read_text().replace("  bool released = 1;", added))

    result = buf("breaking", "--against", str(root / BASELINE), cwd=tmp_path)

    assert result.returncode == 0, result.stdout + result.stderr


def _copy(root, folder):
    shutil.copy(root / "buf.yaml", folder)
    shutil.copytree(root / "protos/omniserve", folder / "protos/omniserve")


def _fields(contracts):
    fields = {(name, field.number, field.name) for name, message in contracts.messages() for field in message.field}
    values = {(name, value.number, value.name) for name, enum in contracts.enums() for value in enum.value}
    rpcs = {(rpc.service, 0, rpc.method.name) for rpc in contracts.rpcs()}
    return fields | values | rpcs
