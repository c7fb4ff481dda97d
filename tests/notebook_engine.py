"""Notebooks executed in this process by papermill: everything of a run but a kernel of its own, seconds less each."""

import types
from functools import partial

import nbformat.v4
import papermill
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from papermill.engines import Engine, papermill_engines
from traitlets.config import Config


class InProcess(Engine):
    """papermill's engine: every cell in one IPython shell, with what it prints, displays and raises."""

    @classmethod
    def execute_managed_notebook(cls, manager, kernel_name, **options):
        quiet = Config(HistoryManager={"enabled": False}, InteractiveShell={"colors": "nocolor"})
        shell = InteractiveShell.instance(config=quiet, user_module=types.ModuleType("notebook"))
        try:
            for index, cell in enumerate(manager.nb.cells):
                manager.cell_start(cell, index)
                if cell.cell_type == "code":
                    failed = execute(shell, cell)
                    if failed:
                        manager.cell_exception(cell, index, exception=failed)
                        return
                manager.cell_complete(cell, index)
        finally:
            shell.restore_sys_module_state()
            InteractiveShell.clear_instance()


def execute(shell: InteractiveShell, cell: nbformat.NotebookNode) -> BaseException | None:
    """Run one cell and keep what it gave; what stopped it, or None."""
    cell.outputs = []
    with capture_output() as said:
        result = shell.run_cell(cell.source, store_history=True)
    cell.execution_count = result.execution_count
    failed = result.error_before_exec or result.error_in_exec
    for name, text in (("stdout", said.stdout), ("stderr", said.stderr)):
        if text and not failed:
            cell.outputs.append(nbformat.v4.new_output("stream", name=name, text=text))
    for shown in said.outputs:
        cell.outputs.append(nbformat.v4.new_output("display_data", data=shown.data, metadata=shown.metadata or {}))
    if failed:
        what = {"ename": type(failed).__name__, "evalue": str(failed), "traceback": said.stdout.splitlines()}
        cell.outputs.append(nbformat.v4.new_output("error", **what))
    return failed


papermill_engines.register("in-process", InProcess)
execute_notebook = partial(papermill.execute_notebook, engine_name="in-process")
