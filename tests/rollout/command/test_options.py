"""Where the worker's options come from, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.command.cli import main
from rollout.command.config import WorkerConfig
from rollout.command.options import OptionError, check_variables, read_options


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_WORKER_DEVICE", raising=False)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "worker.yaml"
    path.write_text(text)
    return path


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "weights: f\nmax_running: 1\nmax_step_tokens: 100\nkv_tokens: 1\nclient_timeout: 9\n")
    monkeypatch.setenv("ROLLOUT_WORKER_MAX_RUNNING", "2")
    monkeypatch.setenv("ROLLOUT_WORKER_KV_TOKENS", "2")
    options = read_options({"kv_tokens": "3"}, file)
    config = options.config
    assert (config.kv_tokens, config.max_running, config.max_step_tokens) == (3, 2, 100)
    assert (config.weights, config.client_timeout, config.max_waiting) == (Path("f"), 9.0, 65536)
    assert options.origins == {
        "weights": f"{file}:1",
        "max_step_tokens": f"{file}:3",
        "client_timeout": f"{file}:5",
        "max_running": "environment ROLLOUT_WORKER_MAX_RUNNING",
        "kv_tokens": "command line",
    }


def test_the_configuration_itself_looks_at_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_MAX_RUNNING", "2")
    assert WorkerConfig(weights=Path("w")).max_running == 64


def test_the_file_can_be_named_by_a_variable_and_the_command_line_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_CONFIG", str(write(tmp_path, "weights: by-variable\n")))
    assert read_options({}).config.weights == Path("by-variable")
    other = tmp_path / "other.yaml"
    other.write_text("weights: by-option\n")
    assert read_options({}, other).config.weights == Path("by-option")


def test_names_with_dashes_lists_sizes_and_words(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "weights: w\nkv-memory: 1.5GiB\nprefix_cache: off\nlog-level: error\n"
        "env:\n  - a=b:C\n  - d=e:F\nmax_context: null\n",
    )
    config = read_options({}, file).config
    assert (config.kv_memory, config.prefix_cache, config.log_level) == (3 * 2**29, False, "error")
    assert (config.env, config.max_context) == (("a=b:C", "d=e:F"), None)


def test_a_list_in_a_variable_has_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_ENV", "a=b:C,process , d=e:F, process-2=g:H, process=i:J,process")
    monkeypatch.setenv("ROLLOUT_WORKER_TOOLS", "a.b,c")
    config = read_options({"weights": "w"}).config
    assert config.env == ("a=b:C,process", "d=e:F", "process-2=g:H", "process=i:J,process")
    assert config.tools == ("a.b", "c")


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_CURVE_SECRET", "")
    monkeypatch.setenv("ROLLOUT_WORKER_CONFIG", "")
    assert read_options({"weights": "w"}).config.curve_secret is None


def test_a_tilde_is_the_home_directory_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ROLLOUT_WORKER_READY_FILE", "~/ready")
    config = read_options({}, write(tmp_path, "weights: ~/models/m\n")).config
    assert (config.weights, config.ready_file) == (tmp_path / "models/m", tmp_path / "ready")


def test_a_fallback_counts_only_where_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_WEIGHTS", "w")
    options = read_options({}, fallback={"weights": "x", "max_running": 5})
    assert (options.config.weights, options.config.max_running) == (Path("w"), 5)
    assert options.origins.keys() == {"weights"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_runing: 3\n", "worker.yaml:1: max_runing is no option; did you mean max_running?"),
        ("# a comment\n\nweigths: w\n", "worker.yaml:3: weigths is no option; did you mean weights?"),
        ("config: other.yaml\n", "worker.yaml:1: config is no option"),
        ("weights: w\nmax_running: many\n", "worker.yaml:2: max_running: should be a valid integer, not 'many'"),
        ("weights: w\nkv_memory: much\n", "worker.yaml:2: kv_memory: 'much' is no size"),
        ("weights: w\nmax_running: yes\n", "worker.yaml:2: max_running: is true; put the word in quotes"),
        ("weights: w\nkv-tokens: 1\nkv_tokens: 2\n", "worker.yaml:3: kv_tokens is given before, in line 2"),
        ("weights: w\nenv: {a: b}\n", "worker.yaml:2: env: should be a list, not {'a': 'b'}"),
        ("weights: w\ndevice:\n", "worker.yaml:2: device: should be"),
        ("weights: [w\n", "worker.yaml:2: is no YAML: expected"),
        ("weights: w\n\tdevice: cpu\n", "worker.yaml:2: is no YAML: found character"),
        ("- weights\n", "must hold `option: value` lines"),
        ("weights\n", "must hold `option: value` lines"),
        ("weights: !!python/object:os.system w\n", "worker.yaml:1: weights: could not determine a constructor"),
        ("device: cpu\n", "--weights is required"),
        ("weights: w\nkv_memory: 1G\nkv_tokens: 5\n", "give one of them"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(OptionError) as caught:
        read_options({}, file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(OptionError, match=message) as caught:
            read_options({}, path)
        assert str(path) in str(caught.value)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"weights: \xff\xfe")
    with pytest.raises(OptionError, match="is not UTF-8 text"):
        read_options({}, binary)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert read_options({"weights": "w"}, write(tmp_path, "# nothing yet\n")).origins == {"weights": "command line"}


def test_all_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_MAX_RUNNING", "many")
    with pytest.raises(OptionError) as caught:
        read_options({"drain_timeout": "nan"})
    for part in ("--weights is required", "ROLLOUT_WORKER_MAX_RUNNING: should", "--drain-timeout: should"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ROLLOUT_WORKER_MAX_RUNING": "3"}, "did you mean ROLLOUT_WORKER_MAX_RUNNING?"),
        ({"ROLLOUT_WORKER_MAX-RUNNING": "3"}, "did you mean ROLLOUT_WORKER_MAX_RUNNING?"),
        ({"rollout_worker_kv_token": "3"}, "rollout_worker_kv_token, which is no option; did you mean"),
        ({"ROLLOUT_WORKER_METRIC_PORT": "9"}, "did you mean ROLLOUT_WORKER_METRICS_PORT?"),
        ({"ROLLOUT_WORKER_ZZZZZZ": "1"}, "ROLLOUT_WORKER_ZZZZZZ, which is no option"),
        ({"ROLLOUT_WORKER_": ""}, "ROLLOUT_WORKER_, which is no option"),
    ],
)
def test_a_variable_that_is_no_option_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_variables(environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"ROLLOUT_WORKER_MAX_RUNNING": "3", "rollout_worker_weights": "w", "ROLLOUT_WORKER_CONFIG": "c"},
        {"ROLLOUT_WORKERS": "2", "ROLLOUT": "1", "MY_ROLLOUT_WORKER_X": "1"},
        {
            "ROLLOUT_WORKER_SERVICE_HOST": "10.0.0.7",
            "ROLLOUT_WORKER_SERVICE_PORT": "5555",
            "ROLLOUT_WORKER_SERVICE_PORT_ZMQ": "5555",
            "ROLLOUT_WORKER_PORT": "tcp://10.0.0.7:5555",
            "ROLLOUT_WORKER_PORT_5555_TCP": "tcp://10.0.0.7:5555",
            "ROLLOUT_WORKER_PORT_5555_TCP_PROTO": "tcp",
            "ROLLOUT_WORKER_0_PORT_5555_TCP_ADDR": "10.0.0.7",
        },
    ],
)
def test_options_other_names_and_what_kubernetes_adds_are_let_be(environ: dict[str, str]) -> None:
    check_variables(environ)


def test_a_misspelt_command_is_corrected_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["docter", "--weights", "w"])
    assert caught.value.code == 2
    assert "unrecognized arguments: docter; did you mean doctor?" in capsys.readouterr().err
