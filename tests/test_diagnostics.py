"""Every declared diagnostic has a test that provokes it; none is missing, none is stale."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import megadsl
from megadsl.diagnostics import CATALOGUE, diagnose
from tests.broken_specs import codes
from tests.shown import check, recording, shown
from tools.catalogue import COMMAND, PAGES, meanings, pages

TESTS = Path(__file__).parent
DECLARED = re.compile(r"declare\(\s*\"(MK\d+)\"")

# What no spec or schedule file alone provokes: its test, as file.py::function, by code.
ELSEWHERE: dict[str, str] = {
    "MK001": "test_dsl_schedule.py::test_unknown_arch",
    "MK100": "test_dsl_errors.py::test_outside_a_kernel",
    "MK108": "test_dsl_errors.py::test_tensor_of_another_kernel",
    "MK125": "test_lower_graph_errors.py::test_an_unknown_op",
    "MK133": "test_lower_graph_errors.py::test_a_read_before_its_write",
    "MK134": "test_lower_graph_errors.py::test_a_cycle",
    "MK135": "test_lower_graph_errors.py::test_recorded_shapes_are_checked",
    "MK167": "test_lower_schedule.py::test_an_architecture_that_lacks_something",
    "MK168": "test_lower_schedule.py::test_refusals",
    "MK180": "test_dsl_registry.py::test_unknown_model",
    "MK181": "test_dsl_registry.py::test_missing_files",
    "MK182": "test_dsl_registry.py::test_files_that_do_not_load",
    "MK183": "test_dsl_registry.py::test_no_kernel",
    "MK184": "test_dsl_registry.py::test_unknown_and_ambiguous_kernels",
    "MK185": "test_dsl_registry.py::test_broken_configuration",
    "MK186": "test_dsl_registry.py::test_broken_models_dict",
    "MK226": "test_explain.py::test_an_unknown_code_names_near_ones",
    "MK224": "test_dsl_schedule.py::test_what_is_no_kernel",
    "MK259": "test_kernel_batch.py::test_what_is_no_batch",
    "MK257": "test_kernel_batch.py::test_what_is_no_batch",
    "MK282": "test_kernel_pages.py::test_what_pages_cannot_be",
    "MK283": "test_kernel_pages.py::test_what_pages_cannot_be",
    "MK469": "test_runtime_pages.py::test_who_is_out_of_pages_is_told",
    "MK478": "test_runtime_pages.py::test_a_step_without_pages_changes_nothing",
    "MK492": "test_runtime_pages.py::test_a_step_in_pages_needs_a_table",
    "MK536": "test_kernel_pages.py::test_a_pool_that_is_too_large_is_refused",
    "MK260": "test_dsl_schedule.py::test_unknown_names",
    "MK261": "test_schedule_file.py::test_a_wrong_line",
    "MK262": "test_schedule_file.py::test_a_wrong_line",
    "MK263": "test_schedule_file.py::test_a_wrong_line",
    "MK264": "test_schedule_file.py::test_a_wrong_line",
    "MK265": "test_schedule_file.py::test_a_wrong_line",
    "MK266": "test_schedule_file.py::test_what_is_decided_twice",
    "MK267": "test_schedule_file.py::test_a_wrong_line",
    "MK268": "test_schedule_chosen.py::test_another_architecture",
    "MK269": "test_schedule_chosen.py::test_a_file_that_is_meant_otherwise",
    "MK281": "test_custom_ops.py::test_a_meaning_that_is_not_what_was_declared",
    "MK289": "test_formats.py::test_asked_for_at_compilation",
    "MK301": "test_build_nvcc.py::test_no_compiler_names_the_pip_line",
    "MK302": "test_build_nvcc.py::test_a_refused_kernel_shows_the_compilers_own_lines",
    "MK303": "test_build_cache.py::test_an_unwritable_cache_warns_once_and_works",
    "MK304": "test_build_nvcc.py::test_a_compiler_that_will_not_do",
    "MK305": "test_build_nvcc.py::test_a_newer_toolkit_is_a_warning",
    "MK306": "test_build_nvcc.py::test_a_compiler_that_will_not_do",
    "MK307": "test_diagnostics_environment.py::test_an_unknown_stage_to_keep",
    "MK308": "test_build_nvcc.py::test_too_much_hot_code_names_the_biggest_role",
    "MK309": "test_build_nvcc.py::test_spills_are_counted_and_warned_of",
    "MK310": "test_build_nvcc.py::test_an_out_that_is_a_file_is_refused",
    "MK311": "test_diagnostics_environment.py::test_without_compilers",
    "MK312": "test_diagnostics_environment.py::test_source_that_gcc_refuses",
    "MK360": "test_emulator_schedules.py::test_faults",
    "MK361": "test_emulator_schedules.py::test_a_launch_that_does_not_fit_the_kernel",
    "MK362": "test_diagnostics_environment.py::test_without_compilers",
    "MK363": "test_detector.py::test_a_race_is_a_diagnostic",
    "MK364": "test_detector.py::test_a_race_is_a_diagnostic",
    "MK365": "test_detector.py::test_a_race_is_a_diagnostic",
    "MK366": "test_detector.py::test_a_race_is_a_diagnostic",
    "MK400": "test_runtime_gguf.py::test_packages_that_are_missing_are_named",
    "MK401": "test_runtime_gguf.py::test_refusals",
    "MK402": "test_runtime_gguf.py::test_refusals",
    "MK403": "test_runtime_gguf.py::test_every_truncation_is_a_diagnostic",
    "MK404": "test_runtime_gguf.py::test_absurd_counts_end_at_once",
    "MK405": "test_runtime_gguf.py::test_refusals",
    "MK406": "test_runtime_gguf.py::test_refusals",
    "MK407": "test_runtime_gguf.py::test_refusals",
    "MK408": "test_diagnostics_environment.py::test_the_demo_weights_are_not_installed",
    "MK410": "test_runtime_gguf.py::test_packages_that_are_missing_are_named",
    "MK411": "test_diagnostics_environment.py::test_a_tokenizer_that_contradicts_itself",
    "MK420": "test_weights_check.py::test_everything_wrong_is_listed_at_once",
    "MK421": "test_weights_check.py::test_everything_wrong_is_listed_at_once",
    "MK422": "test_weights_check.py::test_everything_wrong_is_listed_at_once",
    "MK423": "test_weights_check.py::test_everything_wrong_is_listed_at_once",
    "MK424": "test_runtime_program.py::test_wrong_set_up",
    "MK430": "test_diagnostics_environment.py::test_no_room_for_packed_weights",
    "MK440": "test_diagnostics_environment.py::test_gpus_that_will_not_do",
    "MK441": "test_diagnostics_environment.py::test_gpus_that_will_not_do",
    "MK442": "test_diagnostics_environment.py::test_gpus_that_will_not_do",
    "MK443": "test_diagnostics_environment.py::test_gpus_that_will_not_do",
    "MK468": "test_runtime_queue.py::test_clusters_that_find_no_room_are_a_diagnostic",
    "MK444": "test_runtime_queue.py::test_a_stream_of_fewer_sms_is_a_diagnostic",
    "MK445": "gpu/test_runtime_gpu.py::test_limits_are_diagnostics",
    "MK446": "test_diagnostics_environment.py::test_a_driver_call_that_fails",
    "MK447": "test_runtime_program.py::test_wrong_set_up",
    "MK448": "test_runtime_program.py::test_wrong_set_up",
    "MK449": "test_runtime_queue.py::test_a_busy_gpu_is_a_diagnostic",
    "MK450": "test_runtime_program.py::test_bad_input",
    "MK451": "test_runtime_program.py::test_bad_input",
    "MK452": "test_runtime_program.py::test_bad_input",
    "MK453": "test_runtime_program.py::test_bad_input",
    "MK454": "test_runtime_program.py::test_bad_input",
    "MK455": "test_runtime_program.py::test_bad_input",
    "MK456": "test_runtime_program.py::test_bad_input",
    "MK457": "test_runtime_program.py::test_wrong_set_up",
    "MK458": "test_runtime_program.py::test_bad_input",
    "MK459": "test_runtime_program.py::test_wrong_set_up",
    "MK460": "test_trace.py::test_refusals",
    "MK461": "test_bench.py::test_a_cache_without_room_is_a_diagnostic",
    "MK462": "test_trace.py::test_refusals",
    "MK463": "test_trace.py::test_refusals",
    "MK464": "test_trace.py::test_refusals",
    "MK465": "test_kernel_steps.py::test_what_cannot_be_is_refused",
    "MK466": "test_kernel_steps.py::test_what_cannot_be_is_refused",
    "MK467": "test_kernel_steps.py::test_what_cannot_be_is_refused",
    "MK496": "test_runtime_batch.py::test_kernels_and_generators_belong_together",
    "MK497": "test_runtime_batch.py::test_what_a_batch_refuses",
    "MK254": "test_kernel_window.py::test_a_window_shorter_than_a_step",
    "MK470": "test_checkpoint_errors.py::test_what_a_config_asks_for",
    "MK471": "test_checkpoint_errors.py::test_what_a_config_asks_for",
    "MK472": "test_checkpoint_errors.py::test_what_a_config_asks_for",
    "MK474": "test_checkpoint_errors.py::test_weights_that_are_not_there",
    "MK475": "test_checkpoint_errors.py::test_weights_that_are_not_there",
    "MK476": "test_checkpoint_errors.py::test_weights_that_are_damaged",
    "MK477": "test_runtime_readahead.py::test_a_file_that_has_become_shorter",
    "MK498": "test_bench.py::test_a_batch",
    "MK499": "test_torch_batch.py::test_what_a_batch_refuses",
    "MK480": "test_torch.py::test_bad_calls",
    "MK481": "test_torch.py::test_memory_that_dlpack_has_no_word_for",
    "MK482": "test_torch.py::test_bad_calls",
    "MK483": "test_torch.py::test_bad_calls",
    "MK484": "test_torch.py::test_bad_calls",
    "MK485": "test_torch.py::test_bad_calls",
    "MK486": "test_torch.py::test_bad_calls",
    "MK487": "test_torch.py::test_a_step_that_is_gone",
    "MK488": "test_torch_generate.py::test_sampling_that_means_nothing",
    "MK489": "test_torch.py::test_what_cannot_be_shared",
    "MK490": "test_torch_generate.py::test_bad_prompts_and_choices",
    "MK491": "test_torch.py::test_a_step_is_not_copied",
    "MK493": "test_tune.py::test_a_log_of_another_search_is_refused",
    "MK494": "test_tune.py::test_a_log_of_another_search_is_refused",
    "MK495": "test_tune.py::test_a_start_that_cannot_be_measured",
    "MK500": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK501": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK502": "test_check_mutants.py::test_why_sentinels_need_four_slots",
    "MK503": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK510": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK511": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK512": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK513": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK514": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK520": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK521": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK522": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK523": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK524": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK525": "test_overlap_l2.py::test_a_scratch_that_is_read",
    "MK530": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK531": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK532": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK533": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK535": "test_kernel_cluster.py::test_the_checker_knows_how_parts_travel",
    "MK534": "test_check_mutants.py::test_rows_appended_under_a_reader",
    "MK540": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK542": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK543": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK544": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK545": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK546": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK547": "test_check_mutants.py::test_a_broken_plan_is_refused",
    "MK550": "test_check_mutants.py::test_budgets",
    "MK551": "test_overlap_code.py::test_a_share_for_a_block_that_is_not_there",
    "MK560": "test_kernel_launches.py::test_broken_launches_are_found",
    "MK561": "test_check_mutants.py::test_a_broken_plan_is_refused",
}


def catalogue() -> set[str]:
    """All codes, after every module has declared its own."""
    for module in pkgutil.walk_packages(megadsl.__path__, "megadsl."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    package = Path(megadsl.__path__[0])
    found = {code for path in package.rglob("*.py") for code in DECLARED.findall(path.read_text())}
    assert found <= set(CATALOGUE)  # tests declare codes of their own
    return found


@cache
def _module(file: str) -> tuple[str, dict[str, ast.stmt]]:
    """The text of a test file, and its statements by the names that they define."""
    text = (TESTS / file).read_text()
    found: dict[str, ast.stmt] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found.update({t.id: statement for t in targets if isinstance(t, ast.Name)})
    return text, found


def strings(file: str, name: str) -> Iterator[str]:
    """The string constants of a test, and of what it uses of its file: tables of cases, helpers."""
    _, statements = _module(file)
    seen, todo = set(), [name]
    while todo:
        at = todo.pop()
        if at in seen or at not in statements:
            continue
        seen.add(at)
        for node in ast.walk(statements[at]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.Name):
                todo.append(node.id)


def test_every_code_has_its_test() -> None:
    here, broken = catalogue(), codes()
    assert here - broken - set(ELSEWHERE) == set(), "no test provokes these: add a broken spec, or name the test in ELSEWHERE"
    assert (broken | set(ELSEWHERE)) - here == set(), "these are not declared any more"
    assert broken & set(ELSEWHERE) == set(), "these have a broken spec: take them off ELSEWHERE"


@pytest.mark.parametrize("code", ELSEWHERE)
def test_the_named_test_provokes_its_code(code: str) -> None:
    file, _, name = ELSEWHERE[code].partition("::")
    assert name.startswith("test_") and isinstance(_module(file)[1].get(name), ast.FunctionDef), f"there is no {ELSEWHERE[code]}"
    assert any(code in text for text in strings(file, name)), f"{ELSEWHERE[code]} does not mention {code}"


def test_every_entry_says_what_and_how() -> None:
    catalogue()
    for code, entry in CATALOGUE.items():
        assert entry.message and entry.mend, code
        assert "NoneType" not in entry.message, code


def test_every_code_has_its_meaning() -> None:
    listed = [code for section in meanings().values() for code in section]
    assert sorted(listed) == sorted(catalogue()), f"tools/meanings.toml and the declarations differ, see {COMMAND}"


def test_the_pages_are_up_to_date() -> None:
    wanted = pages(catalogue())
    there = {path.name: path.read_text() for path in PAGES.iterdir()}
    assert set(there) == set(wanted), f"run: {COMMAND}"
    stale = [name for name, text in wanted.items() if there[name] != text]
    diff = difflib.unified_diff(*(texts[stale[0]].splitlines() for texts in (there, wanted)), lineterm="", n=1) if stale else ()
    assert not stale, f"{stale} differ; when the change is meant, run: {COMMAND}\n" + "\n".join(diff)


def test_what_a_test_shows_is_recorded_and_that_test_exists() -> None:
    """tests/conftest.py compares what is recorded with what the test shows, whenever it runs."""
    assert set(shown()) == {code for code, test in ELSEWHERE.items() if not test.startswith("gpu/")}, f"run: {COMMAND}"
    assert all(recorded.test.partition("[")[0] == f"tests/{ELSEWHERE[code]}" for code, recorded in shown().items())
    files = sorted({recorded.test.partition("::")[0] for recorded in shown().values()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    listed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {recorded.test for recorded in shown().values()} <= set(listed), f"run: {COMMAND}"


def test_a_test_that_shows_something_else_fails() -> None:
    recorded = shown()["MK001"]
    with recording() as made:
        diagnose("MK001", arch="sm_70", known="others")
    with pytest.raises(AssertionError, match="shows MK001 otherwise"):
        check(recorded.test, made)
