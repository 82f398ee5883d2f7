"""How a picture was made, as the text that tools for pictures read from PNG's `parameters` and EXIF's UserComment."""

from dataclasses import dataclass

from services.diffusion.core.options import Options


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known only after a picture was made."""

    model: str
    seed: int
    width: int
    height: int
    sampler: str
    scheduler: str


def parameters(options: Options, facts: Facts) -> str:
    """Return the text."""
    sampling = options.sampling
    said = [
        f"Steps: {sampling.steps}",
        f"CFG scale: {sampling.guidance:g}",
        *([f"Guidance: {sampling.distilled_guidance:g}"] if sampling.distilled_guidance is not None else []),
        f"Seed: {facts.seed}",
        f"Size: {facts.width}x{facts.height}",
        f"Sampler: {facts.sampler} {facts.scheduler}".rstrip(),
        f"Model: {facts.model}",
        "Version: stable-diffusion.cpp",
    ]
    lines = [options.prompt, *([f"Negative prompt: {options.negative_prompt}"] if options.negative_prompt else [])]
    return "\n".join([*lines, ", ".join(said)])
