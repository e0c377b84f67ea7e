"""The commands: they read arguments, call one function each, and print what it found."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from sgld_lora_merge.adapter.families import load_families
from sgld_lora_merge.adapter.formats import load_pairs
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.cli import doctor as checks
from sgld_lora_merge.cli import pushing, show
from sgld_lora_merge.cli.base import BaseWeights
from sgld_lora_merge.cli.inspection import report
from sgld_lora_merge.errors import LoraMergeError, name_some
from sgld_lora_merge.trainer.answers import ShownStatus, UpdateShown
from sgld_lora_merge.trainer.expected import DTYPES
from sgld_lora_merge.trainer.transport import Answer, HttpTransport, SyncError, UploadTransport, accepted
from sgld_lora_merge.wire.schema import (
    ALPHA_IS_RANK,
    DEFAULT_ADAPTER,
    DEFAULT_MODULE,
    RESET_ROUTE,
    ROLLBACK_ROUTE,
    STATUS_ROUTE,
    parse_alpha,
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

app = typer.Typer(
    name="sgld-lora-merge",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Send LoRA adapters to a running sglang-diffusion engine, and see what it serves.\n\n"
    "An engine is named by its URL, for example localhost:30000. If it wants a token, put that into SGLD_LORA_API_KEY. "
    "Every command takes --json. Exit codes: 0 done, 1 refused or not as it should be, 2 wrong arguments.",
)

Url = Annotated[str, typer.Argument(metavar="URL", help="The engine, for example localhost:30000.", show_default=False)]
AdapterPath = Annotated[
    Path,
    typer.Argument(
        metavar="ADAPTER",
        help="A folder that PEFT saved, or a safetensors file (PEFT, diffusers, kohya).",
        show_default=False,
    ),
]
Alpha = Annotated[
    str | None,
    typer.Option(
        metavar=f"NUMBER|{ALPHA_IS_RANK}",
        help="For layers of which the adapter does not say its alpha; the scale of a layer is alpha / rank. "
        f'"{ALPHA_IS_RANK}" is each layer\'s own rank, so scale 1.0.',
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Base = Annotated[
    Path | None, typer.Option(help="Base weights: a safetensors file, a folder of them, or the whole model's folder.")
]


def failing_with_a_sentence(command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """End a command that fails with the sentence of its error, on stderr, and exit code 1."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return command(*args, **kwargs)
        except LoraMergeError as error:
            typer.secho(f"sgld-lora-merge: {error}", fg="red", err=True)
            raise typer.Exit(1) from error

    return run


@app.command("doctor")
@failing_with_a_sentence
def doctor(as_json: AsJson = False) -> None:
    """Examine this machine: sglang, the plugin, the GPU, shared memory, and what the environment selects.

    Run it where the engine runs, in its environment. No model is loaded. The exit code is 1 if anything has failed.
    """
    found = checks.examine()
    content = {"checks": [asdict(check) for check in found]}
    _print(as_json, content, lambda console, _: console.print(show.checks(found)))
    if any(check.state == "failure" for check in found):
        raise typer.Exit(1)


@app.command("status")
@failing_with_a_sentence
def show_status(
    url: Url,
    as_json: AsJson = False,
    watch: Annotated[float | None, typer.Option(help="Ask again every so many seconds, until Ctrl-C.")] = None,
) -> None:
    """Show what is live in every module, in which version, and what became of the last updates."""
    engine = connect(url)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            known = status(engine)
            if watch is not None and not as_json:
                Console().clear()  # of a terminal; a log keeps all
            _print(as_json, known, show.print_status)
            if watch is None:
                return
            time.sleep(watch)


@app.command("reset")
@failing_with_a_sentence
def reset(
    url: Url,
    module: Annotated[list[str] | None, typer.Option(help="Only this module; may be given several times.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Take out this adapter only, and leave the others.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bring the base weights back, bit for bit."""
    answer = connect(url).ask(RESET_ROUTE, {"target_modules": module, "adapter": adapter})
    _print(as_json, answer, show.print_message)


@app.command("rollback")
@failing_with_a_sentence
def rollback(url: Url, as_json: AsJson = False) -> None:
    """Bring back what was live before the last update or reset, one step."""
    answer = connect(url).ask(ROLLBACK_ROUTE, {})
    _print(as_json, answer, show.print_message)


@app.command("push")
@failing_with_a_sentence
def push(
    url: Url,
    path: AdapterPath,
    alpha: Alpha = None,
    module: Annotated[
        str | None, typer.Option(help="Module of the pipeline; the transformer, or where prefixes of the names lead.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Its name in the engine, where several shall add up.")] = None,
    version: Annotated[
        str | None, typer.Option(help="weight_version to report; the file's or folder's name if left out.")
    ] = None,
    ipc: Annotated[
        bool, typer.Option("--ipc", help="By handles of shared memory: the engine is on this machine.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Then compare every layer with what it should be; needs --base.",
        ),
    ] = False,
    base: Base = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show where each layer would land, and with which scale.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send an adapter, which then is live on every rank, or not at all.

    Scales are those PEFT computes with: alpha, rsLoRA and patterns come from adapter_config.json, or from the .alpha
    entries of the file. What the adapter does not name goes back to its base weight.

    sgld-lora-merge push localhost:30000 outputs/step-100 --dry-run

    sgld-lora-merge push localhost:30000 style.safetensors --alpha 16 --adapter style
    """
    if verify and base is None:
        raise LoraMergeError("--verify needs --base: what a layer must be is computed from its base weight")
    update = pushing.PushedAdapter(_load(path, alpha), module, adapter, version or path.resolve().stem)
    engine = connect(url, upload=not ipc)
    modules = status(engine)["modules"]
    mapped = pushing.mapping(engine, update) if dry_run or verify or ipc else []
    if dry_run:
        content = {"layers": [asdict(each) for each in mapped]}
        _print(as_json, content, lambda console, _: show.print_mapping(console, mapped))
        raise typer.Exit(1 if any(each.fault for each in mapped) else 0)
    expected = {}
    if base is not None and verify:
        if not modules or {each.module for each in mapped if each.module} - modules.keys():
            raise LoraMergeError(
                f"the status of {engine.url} has {name_some(sorted(modules)) or 'no modules'}, the adapter has others"
            )
        precision = Precision(next(iter(modules.values()))["merge_precision"])
        expected = pushing.expectations(update, base, mapped, precision)
        for name in expected:
            if others := modules[name]["adapters"].keys() - {adapter or DEFAULT_ADAPTER}:
                raise LoraMergeError(
                    f"{name} holds {name_some(sorted(others))} too: their sum is not verified from here"
                )
    answer = pushing.hand_over(engine, update, mapped) if ipc else _upload(engine, update, quiet=as_json)
    accepted(f"{engine.url} answered", answer, UpdateShown)
    if verify:
        answer["verified"] = pushing.verify(engine, expected)
    _print(as_json, answer, show.print_answer)


@app.command("inspect")
@failing_with_a_sentence
def inspect(
    path: AdapterPath,
    family: Annotated[
        str | None, typer.Option(help="Compare with the target modules of this family: a name from configs/.")
    ] = None,
    base: Base = None,
    module: Annotated[str, typer.Option(help="Whose base weights those are.")] = DEFAULT_MODULE,
    alpha: Alpha = None,
    as_json: AsJson = False,
) -> None:
    """Show an adapter's layers: rank, scale, dtype and size of the update.

    With --base also how large the update is beside the base weight, and which share of it rounding would take.
    """
    families = load_families()
    if family is not None and family not in families:
        raise LoraMergeError(f"there is no family {family!r}; there are {', '.join(families)}")
    known = families[family] if family is not None else None
    found = report(
        _load(path, alpha),
        known.target_modules if known else None,
        BaseWeights(base, module) if base is not None else None,
        DTYPES[known.forward_dtype] if known else None,
    )

    _print(as_json, asdict(found), lambda console, _: show.print_report(console, found))


def main() -> None:
    """Run the command line."""
    app()


def connect(url: str, *, upload: bool = False) -> HttpTransport:
    """Return the engine at a URL, ``http://`` in front or not; updates go as JSON, or as an uploaded file.

    Raises:
        LoraMergeError: it is no URL.
    """
    try:
        return (UploadTransport if upload else HttpTransport)(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL as error:
        raise LoraMergeError(f"{url!r} is no URL: {error}") from error


def status(engine: HttpTransport) -> Answer:
    """Return what is live.

    Raises:
        LoraMergeError: there is no engine, one without the plugin, or one whose status lacks what is shown of it.
    """
    try:
        return accepted(f"{engine.url} answered", engine.ask(STATUS_ROUTE), ShownStatus)
    except SyncError as error:
        if error.answered == 404:
            raise LoraMergeError(
                f"{engine.url} is an engine without sgld-lora-merge: run doctor where it runs"
            ) from error
        raise


def _load(path: Path, alpha: str | None) -> Sequence[Pair]:
    """Return the pairs of an adapter; a wrong alpha is a wrong argument."""
    try:
        said = None if alpha is None else parse_alpha(alpha)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--alpha") from error
    return load_pairs(path, said)


def _print(as_json: bool, content: dict[str, Any], show_content: Callable[[Console, dict[str, Any]], None]) -> None:
    """Print the content as one line of JSON, or as a person wants it."""
    if as_json:
        typer.echo(json.dumps(content))
    else:
        show_content(Console(), content)


def _upload(engine: HttpTransport, update: pushing.PushedAdapter, *, quiet: bool) -> dict[str, Any]:
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("uploading", total=None)
        return pushing.upload(
            engine,
            update,
            begin=lambda total: progress.update(task, total=total),
            gone=lambda count: progress.update(task, completed=count),
        )
