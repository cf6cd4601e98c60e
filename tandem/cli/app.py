"""The command line's words: commands, options, help. What they do is elsewhere, imported when a command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tandem import __version__
from tandem.cli.advise import advise
from tandem.cli.bench import bench
from tandem.cli.console import print_error, stderr_console, stdout_console
from tandem.cli.cores import available_cores
from tandem.cli.distill import distill
from tandem.errors import TandemError


class _Reporting(TyperGroup):
    """Ends with one line, and no traceback, when a command raises what its user can act on."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TandemError as error:
            print_error(stderr_console(), error.message)
            raise typer.Exit(1) from None


def build_app() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        cls=_Reporting,
        name="tandem",
        help="Speculative decoding as a service: the same model, the same distribution, sooner.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command("up")(_up)
    app.command("down")(_down)
    app.command("chat")(_chat)
    app.command("verify")(_verify)
    app.command("bench")(bench)
    app.command("advise")(advise)
    app.command("distill")(distill)
    app.command("version")(_version)
    models = typer.Typer(help="Models on this machine.", no_args_is_help=True)
    models.command("list")(_models_list)
    models.command("pull")(_models_pull)
    models.command("path")(_models_path)
    app.add_typer(models, name="models")
    return app


def _show_version(*, asked: bool) -> None:
    if asked:
        _version()
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", is_eager=True, callback=lambda asked: _show_version(asked=asked)
        ),
    ] = False,
) -> None:
    pass


def _version() -> None:
    """Show the version."""
    stdout_console().print(f"tandem {__version__}")


def _up(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="The target: `bundled`, a Hugging Face folder, hub id or .gguf file.", envvar="TANDEM_TARGET_MODEL"
        ),
    ] = "bundled",
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="A smaller model with the same tokenizer. Without one, n-grams of the text itself are the drafts.",
            envvar="TANDEM_DRAFT_MODEL",
        ),
    ] = None,
    draft_table: Annotated[
        str | None,
        typer.Option(
            help="n-grams of the target's answers, which `tandem distill` makes; a draft without a model. (default: "
            "the bundled ones, for the bundled model)",
            envvar="TANDEM_DRAFT_TABLE",
            show_default=False,
        ),
    ] = None,
    draft_head: Annotated[
        str | None,
        typer.Option(
            help="A file that says what may follow by the target's hidden states, made by `tandem distill`, too.",
            envvar="TANDEM_TARGET_DRAFT_HEAD",
        ),
    ] = None,
    draft_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft with the first N layers of the draft model or, without one, of the target itself.",
            envvar="TANDEM_DRAFT_NUM_LAYERS",
        ),
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding only.")] = False,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N. (default: auto)", show_default=False)
    ] = None,
    draft_device: Annotated[
        str | None, typer.Option(help="The draft's, where it is another. (default: --device)", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, bfloat16 or float16. (default: auto)", show_default=False),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="CPU threads of each model service. (default: all cores, divided)", show_default=False
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Where the gateway listens; 0.0.0.0: to all machines.", envvar="TANDEM_GATEWAY_HOST"),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The gateway's.", envvar="TANDEM_GATEWAY_PORT")] = 8000,
    target_port: Annotated[
        int, typer.Option(min=1, max=65535, help="The target's, for gRPC.", envvar="TANDEM_TARGET_PORT")
    ] = 50051,
    draft_port: Annotated[
        int, typer.Option(min=1, max=65535, help="The draft's, for gRPC.", envvar="TANDEM_DRAFT_PORT")
    ] = 50052,
    target_metrics_port: Annotated[
        int, typer.Option(min=1, max=65535, help="The target's, for Prometheus.", envvar="TANDEM_TARGET_METRICS_PORT")
    ] = 9101,
    draft_metrics_port: Annotated[
        int, typer.Option(min=1, max=65535, help="The draft's, for Prometheus.", envvar="TANDEM_DRAFT_METRICS_PORT")
    ] = 9102,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that open answers have to finish on Ctrl-C.")] = 10.0,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it serves, and go on in the background.")
    ] = False,
) -> None:
    """Serve a model on this machine: target, gateway and, where a model drafts, draft. Ctrl-C ends all.

    What has no option here is set by the services' own variables (TANDEM_TARGET_..., TANDEM_DRAFT_...,
    TANDEM_GATEWAY_..., TANDEM_LOG_LEVEL).
    """
    from tandem.cli.plan import UpOptions
    from tandem.cli.state import state_dir
    from tandem.cli.up import run_up

    if no_draft and (draft_model or draft_layers):
        raise typer.BadParameter("--no-draft goes with neither --draft-model nor --draft-layers")
    options = UpOptions(
        model=model,
        draft_model=draft_model,
        draft_layers=draft_layers,
        draft_table=draft_table,
        draft_head=draft_head,
        draft=not no_draft,
        device=device,
        draft_device=draft_device,
        dtype=dtype,
        threads=threads,
        cores=available_cores(),
        host=host,
        port=port,
        target_port=target_port,
        draft_port=draft_port,
        target_metrics_port=target_metrics_port,
        draft_metrics_port=draft_metrics_port,
        grace_seconds=grace,
        tls=bool(os.environ.get("TANDEM_GATEWAY_TLS_CERTIFICATE_FILE")),
        asks_for_key=bool(os.environ.get("TANDEM_GATEWAY_API_KEYS_FILE")),
    )
    raise typer.Exit(run_up(options, os.environ, state_dir(), detach=detach))


def _down(
    *,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Only the one whose gateway has this port.")
    ] = None,
) -> None:
    """End what `tandem up` started, open answers first."""
    from tandem.cli.down import run_down
    from tandem.cli.state import state_dir

    run_down(state_dir(), stdout_console(), port=port)


def _chat(
    *,
    url: Annotated[str, typer.Option(help="The gateway's.", envvar="TANDEM_URL")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="For a gateway that asks for one.", envvar="TANDEM_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: always the likeliest token.")] = 0.7,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. (default: what the context holds)", show_default=False)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The same randomness every time. (default: a new one each time)", show_default=False),
    ] = None,
    num_draft_tokens: Annotated[
        str | None, typer.Option(help="At most this many a round, or auto. (default: auto)", show_default=False)
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Of the draft service's drafters. (default: its own)", show_default=False)
    ] = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decoding.")] = False,
) -> None:
    """Chat with a gateway, and see which tokens the draft wrote.

    Lines from a pipe are questions too, one each: echo "Why is the sky blue?" | tandem chat
    """
    from tandem.cli.chat import parse_num_draft_tokens, run_chat
    from tandem.cli.chat_client import ChatSettings

    settings = ChatSettings(
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        speculation=not no_speculation,
        num_draft_tokens=None if num_draft_tokens is None else parse_num_draft_tokens(num_draft_tokens),
        drafter=drafter,
    )
    raise typer.Exit(run_chat(url, api_key=api_key, settings=settings, system=system))


def _verify(
    *,
    url: Annotated[str, typer.Option(help="The gateway's.", envvar="TANDEM_URL")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="For a gateway that asks for one.", envvar="TANDEM_API_KEY")
    ] = None,
    samples: Annotated[int, typer.Option(min=20, help="At most so many for each law.")] = 2000,
    minutes: Annotated[float, typer.Option(min=0.1, help="Draw no more samples after this time.")] = 8.0,
    seeds: Annotated[int, typer.Option(min=1, help="Texts that must be equal under the coupled rule.")] = 6,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two sets, two seeds, 300 samples, three minutes at most.")
    ] = False,
    parameters: Annotated[
        list[str] | None,
        typer.Option(help="Only this set of sampling parameters; may be repeated. (default: all)", show_default=False),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Only this drafter; may be repeated. (default: all there are)", show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once.")] = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**18, help="Other samples.")] = 0,
    allow_ties: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of texts that may differ, as ties do in half precision."),
    ] = 0.0,
    allow_untested: Annotated[
        bool,
        typer.Option(
            "--allow-untested", help="Do not fail where nothing could be tested, as with a draft that is never wrong."
        ),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures to this file.", dir_okay=False, show_default=False)
    ] = None,
) -> None:
    """Test running services: does speculation change what they say? Exit code 1 where it does.

    Compares the laws of samples with and without it, and texts that must be equal: with a seed, at temperature 0.
    """
    from tandem.cli.verify import VerifyOptions, run_verify

    options = VerifyOptions(
        num_samples=min(samples, 300) if quick else samples,
        num_seeds=min(seeds, 2) if quick else seeds,
        minutes=min(minutes, 3.0) if quick else minutes,
        parameter_sets=parameters or (("few", "penalties") if quick else ()),
        drafters=drafter or (),
        concurrency=concurrency,
        base_seed=seed,
        allowed_ties=allow_ties,
        allow_untested=allow_untested,
        json_file=json,
    )
    raise typer.Exit(run_verify(url, api_key=api_key, options=options))


def _models_list() -> None:
    """What is here: the bundled model, checked, its draft, and converted copies."""
    from tandem.cli.models import list_models

    list_models(stdout_console())


def _models_pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="`bundled`, `bundled-draft`, or Hugging Face hub ids. (default: what is bundled)", show_default=False
        ),
    ] = None,
) -> None:
    """Fetch models, checked and ready to load, so that serving needs no network."""
    from tandem.cli.models import pull_models

    raise typer.Exit(pull_models(names or (), stderr_console()))


def _models_path() -> None:
    """Print where the bundled model's file is."""
    from tandem.cli.models import bundled_path

    stdout_console().print(str(bundled_path()), soft_wrap=True, markup=False)
