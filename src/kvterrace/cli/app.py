"""The command line's frame: options, exit statuses, errors. What a command does lies in a module of its own.

Exit statuses: 0 done; 1 the demo's, verify's or doctor's check failed, or not all could be purged; 2 bad input or an
unusable store, one line on stderr; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvterrace import __version__
from kvterrace.cli import bench, doctor, inspect, plan, purge, replay, trace, verify
from kvterrace.cli.console import fail
from kvterrace.errors import KVTerraceError

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvterrace",
    help="Keeps the KV cache of large language models on a ladder of DRAM and SSD.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_INTERRUPTED = 130

_Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write what happened to this file.", dir_okay=False)
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvterrace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps the KV cache of large language models on a ladder of DRAM and SSD."""


@app.command()
def generate(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Folder of a Transformers causal language model.")],
    prompt_file: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Text file of the prompt; give it again for more files.")
    ],
    store: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the store; made if missing.")],
    question: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Asked after the files, so that their KV is shared.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer, in tokens.")] = 128,
    dram: Annotated[str, typer.Option(metavar="SIZE", help="DRAM for KV, e.g. 1GiB.")] = "1GiB",
    ssd: Annotated[str, typer.Option(metavar="SIZE", help="SSD for KV, e.g. 10GiB.")] = "10GiB",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="auto, float32, bfloat16 or float16.")] = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T", help="0 is greedy; above, sample.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the sampling.")] = 0,
    json_file: _Json = None,
) -> None:
    """Answer from text files; restore the KV that the store has, compute and store the rest."""
    from kvterrace.cli.generate import GenerateOptions, run

    run(
        GenerateOptions(
            model=model,
            prompt_files=tuple(prompt_file),
            store=store,
            question=question,
            max_new_tokens=max_new_tokens,
            dram=dram,
            ssd=ssd,
            dtype=dtype,
            temperature=temperature,
            seed=seed,
            json_file=json_file,
        )
    )


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(min=256, metavar="N", help="Tokens of the shared prefix.")] = 4096,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the store; by default one that is removed.")
    ] = None,
    json_file: _Json = None,
) -> None:
    """Show on a real model what a restart costs with and without the store. Nothing to prepare."""
    from kvterrace.cli.demo import run

    if not run(tokens=tokens, store=store, json_file=json_file):
        raise typer.Exit(1)


app.command("inspect")(inspect.command)
app.command("verify")(verify.command)
app.command("purge", epilog=purge.EPILOGUE)(purge.command)
app.command("doctor")(doctor.command)
app.command("plan", epilog=plan.EPILOGUE)(plan.command)
app.command("replay")(replay.command)
app.add_typer(bench.app, name="bench")
app.add_typer(trace.app, name="trace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status and never raises over bad input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(given or ["--help"], prog_name="kvterrace", standalone_mode=False)
    except KVTerraceError as error:
        fail(str(error))
        return 2
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout left: nothing more to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        fail(f"{error.filename or 'I/O'}: {error.strerror or error}")
        return 2
    except Exception as error:
        # Typer's own complaints about options; older versions raise click's, so they are known by what they can do.
        show = getattr(error, "format_message", None)
        if show is None:
            raise
        context = getattr(error, "ctx", None)
        fail(f"{show()} (see {context.command_path if context is not None else 'kvterrace'} --help)")
        return 2
    # Typer makes an exit status of Ctrl-C.
    if status == _INTERRUPTED:
        kept = given[:1] == ["generate"]
        fail("interrupted; what was stored is kept" if kept else "interrupted")
    return status if isinstance(status, int) else 0
