"""The pictures' entries of omniserve.yaml: what they say, whose they are, and where a fault stands."""

from pathlib import Path

import pytest

from services.diffusion.catalogue_file import read_catalogue
from services.diffusion.core.catalogue import Kind
from services.diffusion.served import Broken, Served
from services.diffusion.settings import DiffusionSettings
from services.kit.config import ConfigError
from services.llm.served import read_served
from services.llm.settings import LlmSettings
from tests.fixtures.image_models import make

MODELS = """
models:
  - {name: house, kind: chat, path: nowhere.gguf}
  - name: quick
    kind: image
    diffusion_model: {folder}/tiny-image.safetensors
    llm: {folder}/tiny-llm.safetensors
    taesd: {folder}/tiny-taesd.safetensors
    aliases: [dall-e-3]
    steps: 3
    width: 128
    ttl_s: 60
  - name: careful
    kind: image
    diffusion_model: tiny-image.safetensors
    llm: tiny-llm.safetensors
    taesd: tiny-taesd.safetensors
    steps: 30
    pin: true
    preload: true
  - {name: broken, kind: image, path: absent.gguf}
  - {name: larger, kind: upscaler, path: tiny-x4.safetensors}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("catalogue") / "models"
    make(folder)
    return folder


def catalogue(folder: Path, text: str, **settings):
    file = folder / "omniserve.yaml"
    file.write_text(text.replace("{folder}", str(folder)))
    return read_catalogue(DiffusionSettings(config=file, models_dir=folder, **settings))


def test_each_model_has_its_own_names_defaults_and_stay(folder):
    quick, careful, broken, larger = catalogue(folder, MODELS, steps=9)
    assert (quick.entry.names, quick.defaults.steps, quick.defaults.width) == (("quick", "dall-e-3"), 3, 128)
    assert (quick.ttl_s, quick.pinned, quick.preload) == (60.0, False, False)
    assert (careful.defaults.steps, careful.pinned, careful.preload, careful.required) == (30, True, True, True)
    assert quick.runs_like(careful)
    assert isinstance(broken, Broken)
    assert "absent.gguf" in broken.why
    assert isinstance(larger, Served)
    assert (larger.entry.kind, larger.factor) == (Kind.UPSCALER, 4)


def test_what_a_model_does_not_say_is_as_set_and_the_set_upscaler_stays(folder):
    text = MODELS.partition("    steps: 3")[0]
    quick, larger = catalogue(folder, text, steps=9, ttl_s=7, upscaler=str(folder / "tiny-x4.safetensors"))
    assert (quick.defaults.steps, quick.ttl_s, quick.pinned) == (9, 7.0, False)
    assert larger.entry.name == "tiny-x4"


def test_llm_leaves_the_entries_of_pictures_alone(folder):
    file = folder / "llm.yaml"
    file.write_text(MODELS.replace("{folder}", str(folder)))
    with pytest.raises(ConfigError) as caught:  # its own entry is looked at, with its line
        read_served(LlmSettings(config=file, models_dir=folder))
    assert [(each.line, each.setting) for each in caught.value.faults] == [(3, "models[0].path")]


@pytest.mark.parametrize(
    ("entry", "line", "said"),
    [
        ("{name: a, kind: image}", 3, "needs either `path`"),
        ("{name: a, kind: image, path: x, diffusion_model: y}", 3, "needs either `path`"),
        ("{name: a, kind: upscaler}", 3, "needs `path`"),
        ("{name: a, kind: upscaler, path: x, steps: 4}", 3, "has `steps`"),
        ("{name: a, kind: image, path: x, step: 4}", 3, "did you mean `steps`?"),
        ("{name: a, kind: image, path: x, steps: 0}", 3, "greater than or equal to 1"),
        ("{kind: image, path: x}", 3, "needs `name`"),
        ("{name: a, kind: image, path: x}\n  - {name: b, kind: image, path: y, aliases: [a]}", 4, "name of 'a'"),
        ("{name: a, kind: image, path: x}\n  - {name: a, kind: image, path: y}", 4, "name of 'a'"),
    ],
)
def test_a_fault_has_its_line(folder, entry, line, said):
    with pytest.raises(ConfigError) as caught:
        catalogue(folder, f"models:\n  - {{name: chat, path: x.gguf}}\n  - {entry}\n")
    (fault,) = caught.value.faults
    assert fault.line == line
    assert said in fault.message


def test_the_file_and_a_variable_cannot_both_say_what_is_served(folder):
    with pytest.raises(ConfigError, match="OMNISERVE_SD_MODEL"):
        catalogue(folder, MODELS, model=folder / "other.safetensors")
    with pytest.raises(ConfigError, match="OMNISERVE_SD_UPSCALER"):
        catalogue(folder, MODELS, upscaler="x.safetensors")
