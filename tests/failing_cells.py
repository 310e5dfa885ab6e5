"""Cells that fail while they hold a value, with the error of each; the test defines ``fail``."""

FAILING_CELLS = {
    "function": ("fail()", "ValueError"),
    "await": ("async def wait(): fail()\nawait wait()", "ValueError"),
    "cause": ("try: fail()\nexcept ValueError as exc: raise KeyError from exc", "KeyError"),
    "handled before": ("def handle():\n  try: fail()\n  except ValueError: 1 / 0\nhandle()", "ZeroDivisionError"),
    "from None": ("def hide():\n  try: fail()\n  except ValueError: raise KeyError from None\nhide()", "KeyError"),
    "exit": ("fail(SystemExit)", "SystemExit"),
}
