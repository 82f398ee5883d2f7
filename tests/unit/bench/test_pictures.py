"""How the image benches read an answer, compare pictures and judge."""

import base64
import io
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from bench.parity import run as parity
from bench.parity.gates import Gates, Prices, Times, Verdict, judge, judge_speed, month_usd, speed_of
from bench.parity.likeness import compare, entropy
from bench.parity.sheet import contact_sheet, difference
from bench.pictures import PictureError, read_answer
from bench.teleport import run as teleport
from bench.teleport.rounds import LATENT, RESULT, Shot, Trial

GREY = Image.new("RGB", (64, 64), (100, 100, 100))


def noisy(seed: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def written(picture: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    picture.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def answer(picture: Image.Image = GREY, **changes: object) -> dict:
    told = {"created": 7, "data": [{"b64_json": written(picture), "omniserve": {"inference_time_ms": 500}}]}
    return {**told, "size": "64x64", "output_format": "png", **changes}


def test_a_good_answer_has_no_faults_and_tells_its_time():
    found = read_answer(answer(), {"size": "64x64", "output_format": "png"}, 0.75)
    assert (found.faults, found.inference_s, found.wall_s, found.cache) == ((), 0.5, 0.75, "")
    plain = read_answer({"created": 7, "data": [{"b64_json": written(GREY)}]}, {}, 1)
    assert (plain.faults, plain.inference_s) == ((), None)


@pytest.mark.parametrize(
    ("changes", "asked", "fault"),
    [
        ({"created": "today"}, {}, "`created`"),
        ({}, {"size": "128x64"}, "128x64 was asked for"),
        ({"size": "1x1"}, {}, "`size` says 1x1"),
        ({"output_format": "webp"}, {}, "the picture is a PNG; webp was said"),
        ({}, {"n": 2}, "1 pictures came; 2 were asked for"),
    ],
)
def test_an_envelope_that_is_not_as_asked_is_a_fault(changes, asked, fault):
    (found,) = read_answer(answer(**changes), asked, 1).faults
    assert fault in found


@pytest.mark.parametrize("told", [None, {}, {"data": []}, {"data": [{}]}, {"data": [{"b64_json": "AAAA"}]}])
def test_an_answer_without_a_picture_is_an_error(told):
    with pytest.raises(PictureError):
        read_answer(told, {}, 1)


def pixels(picture: Image.Image) -> np.ndarray:
    return parity.pixels(picture, picture.size)


def test_a_picture_is_wholly_like_itself():
    same = compare(pixels(noisy(1)), pixels(noisy(1)))
    assert (same.structure, same.colour) == (pytest.approx(1), pytest.approx(1))
    assert (same.entropy_drift, same.sharpness, same.colourfulness) == (0, 1, 1)


def test_another_picture_is_less_alike():
    other = compare(pixels(noisy(1)), pixels(noisy(2)))
    assert other.structure < 0.2
    flat = compare(pixels(noisy(1)), pixels(GREY))
    assert flat.sharpness == 0
    assert flat.entropy_drift < -7
    assert flat.colour < 0.1


def test_entropy_is_none_for_one_tone_and_one_bit_for_two():
    assert entropy(pixels(GREY)) == 0
    halves = Image.new("RGB", (64, 64))
    halves.paste((255, 255, 255), (0, 0, 32, 64))
    assert entropy(pixels(halves)) == pytest.approx(1)


def test_gates_that_are_missed_are_told_by_name():
    verdict = Verdict()
    judge("fox", compare(pixels(noisy(1)), pixels(noisy(1))), Gates(), verdict)
    assert verdict.passed
    judge("fox", compare(pixels(noisy(1)), pixels(GREY)), Gates(), verdict)
    assert len(verdict.missed) == 4
    assert all(sentence.startswith("fox: ") for sentence in verdict.missed)


def test_time_inside_the_engines_counts_where_both_tell_it():
    told, untold = Times((2.0, 2.0), (1.0, 1.0)), Times((4.0, 4.0), None)
    prices = Prices(reference_usd_hr=3.6, candidate_usd_hr=1.8, pictures_a_month=1000)
    both = speed_of(told, replace(told, inside=(1.5, 1.5)), prices)
    assert (both.by, both.latency.median, both.wall.median) == ("time inside the engine", 1.5, 1)
    assert (both.reference_usd, both.candidate_usd, both.cost) == (1.0, 0.75, 0.75)
    one = speed_of(told, untold, prices)
    assert (one.by, one.latency.median) == ("wall time", 2)
    verdict = Verdict()
    judge_speed(one, Gates(), verdict)
    assert verdict.missed == ["latency is 2.00 times the reference's, at most 1.25"]
    assert month_usd((1.0, 3.0, 2.0), 1.0, 3600) == 2.0


def test_the_sheet_has_a_row_for_each_prompt_and_shows_differences():
    sheet = contact_sheet([("a fox", noisy(1), noisy(2)), ("é" * 200, GREY, Image.new("RGBA", (32, 32)))])
    assert sheet.width == 800
    assert sheet.height > 2 * 256
    assert difference(GREY, GREY).getextrema() == ((0, 0),) * 3
    assert difference(GREY, Image.new("RGB", (9, 9), (110, 100, 0))).getpixel((1, 1)) == (40, 0, 255)


MISS, REPLAYED = Shot("a", "", 1.0, 1.0, 20), Shot("a", RESULT, 0.0, 0.01, 0)
RESUMED = Shot("a", LATENT, 0.1, 0.1, 1)


def test_a_trial_is_exact_when_the_prime_missed_the_replays_hit_and_all_pixels_agree():
    assert Trial("euler", MISS, MISS, REPLAYED, RESUMED).faults() == []


@pytest.mark.parametrize(
    ("trial", "fault"),
    [
        (Trial("euler", MISS, REPLAYED, REPLAYED, RESUMED), "--seed-offset"),
        (Trial("euler", MISS, replace(MISS, digest="b"), REPLAYED, RESUMED), "the prime differs"),
        (Trial("euler", MISS, MISS, replace(REPLAYED, digest="b"), RESUMED), "the replay differs"),
        (Trial("euler", MISS, MISS, MISS, RESUMED), "the replay was computed anew"),
        (Trial("euler", MISS, MISS, REPLAYED, MISS), "another format was computed anew"),
        (Trial("euler", MISS, MISS, REPLAYED, replace(RESUMED, denoise_calls=2)), "2 denoise calls instead of 1"),
    ],
)
def test_what_is_not_exact_is_told(trial, fault):
    (found,) = trial.faults()
    assert fault in found


class Painter(BaseHTTPRequestHandler):
    """Draws noise by the seed and replays what it was asked with teleport before."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        picture = noisy(asked["seed"] + (self.server.lies and "teleport" in asked))
        key = json.dumps(asked) if "teleport" in asked else None
        ours = {"inference_time_ms": 5, "denoise_calls": 1}
        if key in self.server.kept:
            ours["cache"] = RESULT
        elif key and (asked["seed"], asked.get("sampler")) in self.server.latents:
            ours["cache"] = LATENT
        self.server.kept.add(key)
        if key:
            self.server.latents.add((asked["seed"], asked.get("sampler")))
        body = answer(picture) | {"data": [{"b64_json": written(picture), "omniserve": ours}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def painter():
    with ThreadingHTTPServer(("127.0.0.1", 0), Painter) as server:
        server.kept, server.latents, server.lies = {None}, set(), False
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_reference_is_captured_and_compared_with_later(painter, tmp_path, capsys):
    prompts = tmp_path / "prompts"
    prompts.write_text("a fox\n\na wood\n")
    reference = tmp_path / "reference"
    shared = ["--prompts", str(prompts), "--size", "64x64"]
    assert parity.main(["--reference", painter.url, "--capture-reference", "--out", str(reference), *shared]) == 0
    out = tmp_path / "out"
    gate = ["--gate-latency", "1000"]
    assert parity.main(["--reference-run", str(reference), "--candidate", painter.url, "--out", str(out), *gate]) == 0
    with Image.open(out / "sheet.png") as sheet:
        assert sheet.size[0] == 800
    told = json.loads((out / "parity.json").read_text())
    assert [each["prompt"] for each in told["pictures"]] == ["a fox", "a wood"]
    assert told["missed"] == []
    assert "a substitute for CLIP" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_line(tmp_path, capsys):
    assert parity.main(["--reference", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9"]) == 2
    assert parity.main(["--reference-run", str(tmp_path), "--candidate", "http://127.0.0.1:9"]) == 2
    assert parity.main(["--candidate", "http://127.0.0.1:9"]) == 2
    assert teleport.main(["--base", "http://127.0.0.1:9"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


@pytest.mark.parametrize("lies", [False, True])
def test_exact_replay_is_told_from_what_only_looks_like_it(painter, tmp_path, capsys, lies):
    painter.lies = lies
    out = tmp_path / "teleport.json"
    found = teleport.main(["--base", painter.url, "--samplers", "euler", "lcm", "--steps", "4", "--out", str(out)])
    assert found == (1 if lies else 0)
    if not lies:
        assert "2 trials, 2 exact" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["trials"]) == 2
