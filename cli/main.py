# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that `omniserve --help` is quick
"""The `omniserve` command line: what there is, and how failures are told."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.errors import CliError, Exit

app = typer.Typer(
    name="omniserve",
    help="Look at the mesh, talk to it, fetch models, hand out keys, find out what is wrong.",
    epilog="`--debug`, anywhere on the line, shows the traceback of an error. Every setting is an OMNISERVE_ variable: docs/settings.md.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: three times as fast, and the same text in docs/cli.md
)
models = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List the models, load and unload them, fetch more."
)
app.add_typer(models, name="models")
keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make, list and revoke API keys.")
app.add_typer(keys, name="keys")


class Tier(StrEnum):
    """Tiers that a caller may ask for."""

    PAID = "paid"
    SUB = "sub"
    FREE = "free"
    BACKGROUND = "background"


Url = Annotated[
    str | None, typer.Option("--url", help="Address of the front door.  [default: OMNISERVE_CLI_URL]", metavar="URL")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _version(*, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("omniserve-mesh"))
        except PackageNotFoundError:
            raise CliError("the version is unknown: the checkout is not installed (`make setup`)") from None
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=lambda wanted: _version(wanted=wanted), is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Look at the mesh, talk to it, fetch models, hand out keys, find out what is wrong."""


@app.command()
def status(
    *,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Address to ask.  [default: OMNISERVE_CLI_OPERATOR_URL, then OMNISERVE_CLI_URL]",
            metavar="URL",
        ),
    ] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every two seconds.")] = False,
) -> None:
    """Show what runs, how busy it is, and whether all is well.

    Ends with status 1 when the mesh is degraded or does not answer.
    """
    from cli.settings import base_url, read_settings
    from cli.status import run

    settings = read_settings()
    urls = [url] if url else [settings.operator_door, settings.public_door]
    raise typer.Exit(run([base_url(each) for each in urls], settings, as_json=as_json, watch=watch))


@app.command()
def upstreams(
    *,
    url: Annotated[
        str | None,
        typer.Option("--url", help="The operator's front door.  [default: OMNISERVE_CLI_OPERATOR_URL]", metavar="URL"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show where requests are proxied to, and how that goes.

    FAILED counts connections, timeouts and 5xx answers; LEFT counts requests that went to another group, by cause.
    Ends with status 1 when settings were refused or Envoy's counters cannot be read.
    """
    from cli.settings import base_url, read_settings
    from cli.upstreams import run

    settings = read_settings()
    raise typer.Exit(run(base_url(url or settings.operator_door), settings, as_json=as_json))


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What to say. Without it: what is piped in, or a conversation on a terminal.")
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to ask; the mesh's default one if not given.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", min=0, max=2, help="0 always takes the likeliest token.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens to generate.")
    ] = None,
    tier: Annotated[Tier | None, typer.Option("--tier", help="Tier to ask for; the key's own tier caps it.")] = None,
    url: Url = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens per second after each answer.")] = False,
) -> None:
    """Chat with a model through the front door; the answer streams.

    A prompt and piped text together make one prompt: `omniserve chat "Summarise this" < notes.txt`.
    """
    from cli.chat import run
    from cli.chat.client import ChatOptions
    from cli.settings import base_url, read_settings

    settings = read_settings()
    options = ChatOptions(
        model=model, temperature=temperature, max_tokens=max_tokens, tier=tier.value if tier else None
    )
    run.run(
        prompt,
        system=system,
        options=options,
        url=base_url(url or settings.public_door),
        stats=stats,
        settings=settings,
    )


@app.command()
def image(
    prompt: Annotated[str, typer.Argument(help="What should be seen.")],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: .webp, .png or .jpg. Several get numbers.")
    ] = Path("image.webp"),
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to ask; the mesh's default one if not given.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="WIDTHxHEIGHT; the model's own if not given.", metavar="SIZE")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, max=150, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", min=0, max=100, help="How closely to obey.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Reproduces a picture; each one's is printed.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=10, help="How many pictures.")] = 1,
    negative: Annotated[str | None, typer.Option("--negative", help="What should not be seen.")] = None,
    sampler: Annotated[str | None, typer.Option("--sampler", help="Sampler as the engine names it.")] = None,
    teleport: Annotated[bool, typer.Option("--teleport", help="Replay exactly what was made before.")] = False,
    previews: Annotated[int, typer.Option("--previews", min=0, max=3, help="Previews of each picture.")] = 3,
    tier: Annotated[Tier | None, typer.Option("--tier", help="Tier to ask for; the key's own tier caps it.")] = None,
    url: Url = None,
) -> None:
    """Make a picture from a text, showing its progress, and print its seed.

    `omniserve image "a fox in the snow" -o fox.webp`
    """
    from cli.image.run import Asked, run
    from cli.settings import base_url, read_settings

    settings = read_settings()
    fields = {
        "model": model,
        "size": size,
        "steps": steps,
        "guidance": guidance,
        "seed": seed,
        "negative_prompt": negative,
        "sampler": sampler,
        "teleport": teleport or None,
    }
    asked = Asked(prompt, output, count, previews, fields, tier.value if tier else None)
    run(asked, url=base_url(url or settings.public_door), settings=settings)


@app.command()
def vram(
    *,
    url: Annotated[
        str | None,
        typer.Option("--url", help="The operator's front door.  [default: OMNISERVE_CLI_OPERATOR_URL]", metavar="URL"),
    ] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every two seconds.")] = False,
) -> None:
    """Show who holds how much device memory, who was denied and why. Sizes are MiB.

    Ends with status 1 when nobody knows what is free, or nothing is granted for another reason.
    """
    from cli.settings import base_url, read_settings
    from cli.vram import run

    settings = read_settings()
    raise typer.Exit(run(base_url(url or settings.operator_door), settings, as_json=as_json, watch=watch))


@app.command(context_settings={"allow_interspersed_args": False})
def lease(
    command: Annotated[list[str], typer.Argument(help="The command, after `--`, with its arguments.")],
    *,
    mib: Annotated[int, typer.Option("--mib", min=1, help="Memory to lease, MiB.", metavar="MIB")],
    min_mib: Annotated[
        int | None, typer.Option("--min-mib", min=1, help="Least that is of use; else all or nothing.", metavar="MIB")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="gpu0, gpu1, ... or cpu; else the one with the most room.")
    ] = None,
    tier: Annotated[Tier | None, typer.Option("--tier", help="How deep into the keep-free floor it may reach.")] = None,
    ttl: Annotated[
        int | None, typer.Option("--ttl", min=1, help="How long it lasts after this command died.", metavar="SECONDS")
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, max=600, help="How long to wait for room.", metavar="SECONDS")
    ] = 0.0,
    reclaim: Annotated[bool, typer.Option("--reclaim", help="Ask others to make room for it.")] = False,
    purpose: Annotated[str | None, typer.Option("--for", help="What it is for, as `omniserve vram` shows it.")] = None,
    tenant: Annotated[str, typer.Option("--tenant", help="Who holds it, as `omniserve vram` shows it.")] = "shell",
    url: Annotated[
        str | None,
        typer.Option("--url", help="The operator's front door.  [default: OMNISERVE_CLI_OPERATOR_URL]", metavar="URL"),
    ] = None,
) -> None:
    """Run a command under a lease of device memory: `omniserve lease --mib 4096 -- python train.py`.

    The lease is renewed while the command runs and given back when it ends. Signals are passed on, and the command's exit
    status is this one's. Without room nothing is run, and the status is 75. When the lease is lost, standard error says so
    and the command goes on.
    """
    from cli.lease import Wish, run
    from cli.settings import base_url, read_settings

    settings = read_settings()
    wish = Wish(
        mib=mib,
        min_mib=min_mib,
        device=device,
        tier=tier.value if tier else None,
        ttl_s=ttl,
        wait_s=wait,
        purpose=purpose if purpose is not None else Path(command[0]).name,
        tenant=tenant,
        reclaim=reclaim,
    )
    raise typer.Exit(run(base_url(url or settings.operator_door), wish, command, settings))


@app.command()
def doctor(*, as_json: Json = False) -> None:
    """Check this machine and this checkout: what is wrong, and how to mend it.

    Ends with status 1 when something keeps the mesh from working.
    """
    from cli.doctor import run

    raise typer.Exit(run.run(as_json=as_json))


@models.command("list")
def list_models(
    *,
    local: Annotated[
        bool, typer.Option("--local", help="List the files of the models folder instead of what the mesh serves.")
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List the models that the mesh serves, the default one first."""
    from cli.models import listing
    from cli.settings import base_url, read_settings

    settings = read_settings()
    if local:
        listing.list_local(settings.models_dir, as_json=as_json)
    else:
        listing.list_served(base_url(url or settings.public_door), settings, as_json=as_json)


@models.command("pull")
def pull_model(
    source: Annotated[
        str,
        typer.Argument(
            help="owner/name, owner/name:QUANT, owner/name:FILE (with @REVISION after the name if wanted), or an http(s) address."
        ),
    ],
    *,
    sha256: Annotated[
        str | None, typer.Option("--sha256", help="Digest that the file must have.", metavar="HEX")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="File name to store it under.", metavar="FILE")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Models folder.  [default: OMNISERVE_MODELS_DIR]", metavar="DIR")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch and replace a file that is there already.")] = False,
) -> None:
    """Fetch a GGUF model; an interrupted download goes on when the command is run again.

    A model appears under its name only when it is whole and its checksum is right.
    """
    from cli.models import pull
    from cli.settings import read_settings

    pull.run(source, folder=to or read_settings().models_dir, sha256=sha256, name=name, force=force)


OperatorUrl = Annotated[
    str | None,
    typer.Option("--url", help="The operator's front door.  [default: OMNISERVE_CLI_OPERATOR_URL]", metavar="URL"),
]
OptionalModel = Annotated[str | None, typer.Argument(help="Name or alias; the default model if not given.")]


@models.command("load")
def load_model(model: OptionalModel = None, *, url: OperatorUrl = None) -> None:
    """Load a model into memory; others make room as they do for a request. Returns when it can serve."""
    from cli.models import orders
    from cli.settings import base_url, read_settings

    settings = read_settings()
    orders.run(base_url(url or settings.operator_door), settings, "load", {"model": model})


@models.command("unload")
def unload_model(
    model: OptionalModel = None,
    *,
    wait: Annotated[
        float | None, typer.Option("--wait", help="Seconds to wait for running answers.", min=0, max=3600)
    ] = None,
    url: OperatorUrl = None,
) -> None:
    """Free a model's memory when its running answers have ended. The next request for it loads it again."""
    from cli.models import orders
    from cli.settings import base_url, read_settings

    settings = read_settings()
    wait_ms = None if wait is None else round(wait * 1000)
    orders.run(base_url(url or settings.operator_door), settings, "unload", {"model": model, "wait_ms": wait_ms})


@models.command("swap")
def swap_model(
    path: Annotated[str, typer.Argument(help="A file below OMNISERVE_LLM_SWAP_DIR.")],
    *,
    ngl: Annotated[
        int | None, typer.Option("--ngl", help="Layers on the device, -1 for all; as many as fit if not given.", min=-1)
    ] = None,
    ctx: Annotated[int | None, typer.Option("--ctx", help="Tokens of its KV cache.", min=1)] = None,
    contexts: Annotated[int | None, typer.Option("--contexts", help="Sequences at once.", min=1)] = None,
    url: OperatorUrl = None,
) -> None:
    """Serve another file in place of the default model, when its running answers have ended.

    The former model serves again when the new one cannot be loaded.
    """
    from cli.models import orders
    from cli.settings import base_url, read_settings

    settings = read_settings()
    body = {"path": path, "ngl": ngl, "ctx": ctx, "contexts": contexts}
    orders.run(base_url(url or settings.operator_door), settings, "swap", body)


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Whose key it is: what usage, logs and jobs are kept under.")],
    *,
    tier: Annotated[Tier, typer.Option("--tier", help="Best tier that it may ask for.")] = Tier.FREE,
    expires: Annotated[
        float | None, typer.Option("--expires", help="Days until it ends; never if not given.", metavar="DAYS")
    ] = None,
) -> None:
    """Make a key and print it. It is shown this once; the mesh keeps only its hash.

    Works on the state directory (OMNISERVE_STATE_DIR), whether or not the mesh runs; it counts within a second.
    """
    from cli import keys as command
    from cli.settings import read_settings

    command.create(read_settings().state_dir, name, tier=tier.value, expires_days=expires)


@keys.command("list")
def list_keys(*, as_json: Json = False) -> None:
    """List the keys made here, revoked and expired ones too. Those of omniserve.yaml are not among them."""
    from cli import keys as command
    from cli.settings import read_settings

    command.show(read_settings().state_dir, as_json=as_json)


@keys.command("revoke")
def revoke_key(name: Annotated[str, typer.Argument(help="Whose key.")]) -> None:
    """Revoke a key: the mesh refuses it within a second."""
    from cli import keys as command
    from cli.settings import read_settings

    command.revoke(read_settings().state_dir, name)


def main() -> None:
    """Run the command line; an expected failure is one message on standard error and an exit code, never a traceback."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    # A model may write what the terminal's encoding cannot: better a question mark than a crash.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app(args=arguments)
    except BrokenPipeError:
        # The reader left (`| head`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.FAILED)
    except Exception as error:
        if debug:
            raise
        sys.exit(_tell(error))


def _tell(error: Exception) -> Exit:
    if isinstance(error, CliError):
        print(f"omniserve: {error.message}", file=sys.stderr)
        return error.code
    print(f"omniserve: unexpected {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
    return Exit.INTERNAL


if __name__ == "__main__":
    main()
