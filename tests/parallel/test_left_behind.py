"""What stays in the process after a call: nothing new, and nothing of a model that is deleted."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import torch
from torch import nn

from detrain_nb import Session
from detrain_nb.parallel import split, tp_plan

IMPORT = """
import logging, sys
told = []
for owner, name in ((logging.Logger, "setLevel"), (logging.Filterer, "addFilter"), (logging.Logger, "addHandler")):
    def noted(self, *args, name=name, plain=getattr(owner, name)):
        told.append((sys._getframe(1).f_globals["__name__"], name))
        return plain(self, *args)
    setattr(owner, name, noted)
import detrain_nb.parallel, detrain_nb.training
print([each for each in told if each[0].startswith("detrain_nb")])
"""


def test_importing_changes_no_logger() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_hints_of_torch_are_kept_out_as_long_as_a_model_is_there(two_ranks: Session) -> None:
    two_ranks.run_cell(
        "import gc, logging, torch\nfrom torch import nn\nfrom detrain_nb import parallel as par\n"
        "hints = logging.getLogger('torch.distributed.tensor._redistribute')\n"
        "def is_shown(level=logging.WARNING):\n"
        "    return bool(hints.filter(hints.makeRecord(hints.name, level, '', 0, 'a hint', (), None)))\n"
        "model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))\n"
        "plan = par.tp_plan(model, torch.ones(2, 4))\n"
        "found = [is_shown()]\n"
        "model = par.apply_tensor_plan(model, plan, par.make_mesh(tp=2)['tp'])\n"
        "found += [is_shown(), is_shown(logging.ERROR)]\n"
        "hints.setLevel(logging.INFO)\nfound.append(is_shown())\nhints.setLevel(logging.NOTSET)\n"
        "del model, plan\ngc.collect()\n"
        "found += [is_shown(), hints.level]",
        timeout_s=60,
    )
    assert [*two_ranks.run_cell("found").values.values()] == [[True, False, True, True, True, 0]] * 2


def test_classes_of_a_model_go_with_it() -> None:
    """A cell that is run again defines its classes again, so the old ones must be freed."""

    def found() -> list[weakref.ref[type]]:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
                return result

        model, given = nn.Sequential(Block(), Block(), nn.Linear(8, 4)), torch.randn(2, 3, 8)
        cut = split(model, given, stages=2)
        made = [type(cut.stage(index)) for index in range(2)]
        assert len(tp_plan(model, given).pairs) == 2
        return [weakref.ref(each) for each in (Block, *made)]

    classes = found()
    gc.collect()
    assert [each() for each in classes] == [None] * 3
