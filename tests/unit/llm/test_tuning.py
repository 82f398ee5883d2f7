import pytest

from services.llm.core.tuning import largest_kv_type, largest_ubatch_tokens, plainer, profile_of, tune
from services.llm.core.wire import Tuning


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA GeForce RTX 5090", "blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "blackwell"),
        ("NVIDIA B200", "blackwell"),
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "ada"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "ada"),
        ("NVIDIA L40S", "ada"),
        ("NVIDIA L4", "ada"),
        ("NVIDIA GeForce RTX 3090 Ti", "ampere"),
        ("NVIDIA A100-SXM4-40GB", "ampere"),
        ("NVIDIA RTX A6000", "ampere"),
        ("NVIDIA A10G", "ampere"),
        ("Tesla T4", "turing"),
        ("Quadro RTX 5000", "turing"),
        ("NVIDIA GeForce GTX 1660 Ti", "turing"),
        ("NVIDIA GeForce RTX 2080 SUPER", "turing"),
        ("Tesla V100-SXM2-16GB", "generic"),
        ("AMD Radeon RX 7900 XTX", "generic"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_s_name_tells_its_profile(device: str, profile: str) -> None:
    assert profile_of(device).name == profile


def test_what_is_set_wins_over_the_profile() -> None:
    tuned = tune(Tuning(256, 1024, "f16", "off"), "NVIDIA GeForce RTX 4090")
    assert (tuned.profile, tuned.batch_tokens, tuned.kv_type, tuned.flash_attention) == ("ada", 256, "f16", "off")
    assert tuned.ubatch_tokens == 256, "no more at once than in all"


def test_a_cpu_gets_what_llama_cpp_itself_starts_from() -> None:
    tuned = tune(Tuning(), "cpu")
    assert (tuned.batch_tokens, tuned.ubatch_tokens, tuned.kv_type, tuned.flash_attention) == (2048, 512, "f16", "auto")


def test_a_quantised_cache_has_flash_attention_whoever_chose_it() -> None:
    assert tune(Tuning(), "NVIDIA GeForce RTX 3090").flash_attention == "on"
    assert tune(Tuning(kv_type="q4_0", flash_attention="off"), "cpu").flash_attention == "on"


def test_a_quantised_cache_that_cannot_be_made_is_given_up_only_if_nobody_asked_for_it() -> None:
    device = "NVIDIA GeForce RTX 4090"
    chosen, asked = Tuning(flash_attention="off"), Tuning(kv_type="q8_0")
    plain = plainer(tune(chosen, device), chosen)
    assert plain is not None
    assert (plain.kv_type, plain.flash_attention, plain.profile) == ("f16", "off", "ada")
    assert plainer(tune(asked, device), asked) is None
    assert plainer(tune(Tuning(), "cpu"), Tuning()) is None, "it was as plain as can be"


def test_memory_is_reckoned_with_the_most_that_a_profile_may_choose() -> None:
    assert (largest_kv_type(Tuning()), largest_kv_type(Tuning(kv_type="q8_0"))) == ("f16", "q8_0")
    assert largest_ubatch_tokens(Tuning(), on_host=True) == 512
    assert largest_ubatch_tokens(Tuning(), on_host=False) == 2048
    assert largest_ubatch_tokens(Tuning(ubatch_tokens=64), on_host=False) == 64
