"""Rewrites O0 and O1 of Apex to ``torch.autocast`` and ``torch.amp.GradScaler``, where these do the same.

Files that belong together are rewritten as a whole or not at all. If one function has all of amp, its GradScaler is a
variable, ``scaler``. Otherwise it is an attribute of the optimizer, which every function that steps has. An optimizer
without the attribute never was in ``amp.initialize``, or is a copy, and trains as with amp off. A wrapper without it
is an error, because it may hide an optimizer whose gradients are scaled.

Where one backward pass and one step follow each other, these are the GradScaler's. Where that cannot be told, gradients
are unscaled after each pass, as Apex does it, and steps stay as they are (``Options.each_pass``).
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Hashable, Mapping
from typing import TypeVar

from .mentions import asked_for_spec
from .names import EXTENSIONS, Problem
from .scopes import Names, loose_names, names_of
from .torch_helpers import HELPERS, with_helper
from .torch_imports import Imports
from .torch_lines import split_lines
from .torch_names import CONVERT, OPTIMIZERS, REPLACED, options_problem
from .torch_script import Options, Package, Script
from .torch_training import Training
from .torch_tree import CROWDED

__all__ = ["to_torch"]

_PACKAGES = ("apex", *EXTENSIONS)
_Key = TypeVar("_Key", bound=Hashable)


def to_torch(
    sources: Mapping[_Key, str], *, accumulation: bool = False, o2_as_o1: bool = False
) -> dict[_Key, tuple[str, list[Problem]]]:
    """The new texts of the files that are read, and no problems, or the old texts and all problems.

    Args:
        sources: the texts of files that belong together. Those that do not use Apex are read where they call functions
            of the others.
        accumulation: have a GradScaler move its scale once for all backward passes of a step.
        o2_as_o1: rewrite O2 as O1, whose weights are fp32.

    Raises:
        SyntaxError: if a text that uses Apex is no Python.
    """
    for each_pass in (False, True):
        found = _in_lines(sources, Options(accumulation, o2_as_o1, each_pass))
        if not any(problems for _, problems in found.values()):
            break
    return found


def _in_lines(sources: Mapping[_Key, str], options: Options) -> dict[_Key, tuple[str, list[Problem]]]:
    """The same with one choice of options, and with lines of their own for statements that are changed."""
    crowded: dict[_Key, set[int]] = {}
    found = _to_torch(sources, crowded, options)
    if not crowded:
        return found
    apart = {**sources, **{key: split_lines(sources[key], lines) for key, lines in crowded.items()}}
    still: dict[_Key, set[int]] = {}
    split = _to_torch(apart, still, options)
    if not any(problems for _, problems in split.values()):
        return split
    untold = () if still else (CROWDED,)
    return {key: (text, [each for each in said if each[1] not in untold]) for key, (text, said) in found.items()}


def _to_torch(
    sources: Mapping[_Key, str], crowded: dict[_Key, set[int]], options: Options
) -> dict[_Key, tuple[str, list[Problem]]]:
    """The same. The lines that statements which were to be changed share with others are added to ``crowded``."""
    package = Package(options)
    scripts: dict[_Key, Script] = {}
    unread = dict(sources)

    def read(*words: str) -> None:
        for key in [key for key, text in unread.items() if any(word in text for word in words)]:
            scripts[key] = Script(unread.pop(key), package)
            package.calls.files.append(scripts[key])

    read(" import amp", "amp.initialize(", "amp.scale_loss(", *_PACKAGES)
    for script in scripts.values():
        script.take_names()
    package.calls.read = lambda name: read(f"{name}(", f"{name},")
    training = Training(package, list(scripts.values()))
    training.read()
    training.write()
    for script in scripts.values():
        others = "\n".join(text for text in sources.values() if text is not script.source)
        _rewrite(script, training, others)
    after = {key: _result(script, training) for key, script in scripts.items()}
    crowded |= {key: {x.lineno for x in script.text.crowded} for key, script in scripts.items() if script.text.crowded}
    if any(script.problems for script in scripts.values()):
        return {key: (script.source, sorted(set(script.problems))) for key, script in scripts.items()}
    return {key: (text, []) for key, text in after.items()}


def _rewrite(script: Script, training: Training, others: str) -> None:
    """Rewrite what a file imports from Apex, and names that torch has, too."""
    for node in ast.walk(script.tree):
        own = isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in ("torch", "apex")
        if isinstance(node, ast.ImportFrom) and own and {"amp", "apex"} & {each.name for each in node.names}:
            script.problems.append((node.lineno, "Apex is taken from another file here"))
    for asked in asked_for_spec(script.tree):
        script.text.put(asked, str(isinstance(asked.ops[0], ast.IsNot)))
    if script.names.imports or script.names.uses:
        imports = Imports(script.tree, script.text, script.names, script.problems, others)
        imports.rewrite()
        _replaced_names(script)
        training.write_names(script, imports.gone)


def _result(script: Script, training: Training) -> str:
    """The new text; what is left of Apex in it is a problem."""
    training.indent(script, _inside_strings(script.source))
    if script.problems:
        return script.source
    after = script.text.result()
    if after == script.source:
        return after
    for name, helper in HELPERS.items():
        after = with_helper(after, script.helpers[name], helper)
    for module in ("torch", "functools", "contextlib"):
        after = _with_import(after, module, script.tree)
    tree = ast.parse(after)
    names = names_of(tree, _PACKAGES)
    roots = {use.text.partition(".")[0] for use in script.names.uses if use.name not in REPLACED or "." in use.text}
    if "_amp_stash" in after:  # it would be missed without an error
        line = next(i for i, each in enumerate(script.source.splitlines(), 1) if "_amp_stash" in each)
        script.problems.append((line, "_amp_stash, which a GradScaler has not"))
    for line, name in _left(tree, names, roots):
        script.problems.append((line, f"{name} is used here in a way that cannot be rewritten"))
    return after


def _replaced_names(script: Script) -> None:
    calls = {id(node.func): node for node in ast.walk(script.tree) if isinstance(node, ast.Call)}
    text = script.text
    for use in script.names.uses:
        if use.name not in REPLACED:
            continue
        call = calls.get(id(use.node))
        if "." in use.text or use.name == CONVERT:
            text.put(use.node, REPLACED[use.name])
        if call is None:
            own = REPLACED[use.name] if "." in use.text else use.text
            if use.name == "apex.optimizers.FusedAdam" and isinstance(script.around.owners[id(use.node)], ast.Assign):
                text.put(use.node, f"functools.partial({own}, weight_decay=0.0)")
            elif use.name == "apex.optimizers.FusedAdam":
                script.say(use.node, f"{use.name} that is not called here: its defaults differ")
            continue
        said = options_problem(use.name, call)
        if said:
            script.say(call, said)
        given = {keyword.arg: keyword for keyword in call.keywords}
        mode = given.pop("adam_w_mode", None)
        if mode is not None:
            known = mode.value.value if isinstance(mode.value, ast.Constant) else None
            either = f"(torch.optim.AdamW if {text.source(mode.value)} else torch.optim.Adam)"
            if not known:
                text.put(use.node, "torch.optim.Adam" if known is not None else either)
        if use.name in OPTIMIZERS and "weight_decay" not in given:
            if mode is not None:
                text.change(text.start(mode), text.end(mode), "weight_decay=0.0")
            else:
                text.add_argument(call, "weight_decay=0.0")
        elif mode is not None:
            text.drop_argument(mode)
        if "delay_allreduce" in given:
            start = text.start(given["delay_allreduce"])
            text.change(start, start + len("delay_allreduce"), "find_unused_parameters")


def _left(tree: ast.Module, names: Names, roots: set[str]) -> list[Problem]:
    found = [(node.lineno, "Apex") for node, _ in names.imports]
    return found + loose_names(tree, names, roots - {"torch"})


def _with_import(text: str, module: str, before: ast.Module) -> str:
    """The text with an import of a module, if it needs that more than before."""
    tree = ast.parse(text)
    now, then = (sum(isinstance(x, ast.Name) and x.id == module for x in ast.walk(each)) for each in (tree, before))
    used = now > then
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    plain = [node for node in imports if isinstance(node, ast.Import)]
    bound = any(not alias.asname and alias.name.partition(".")[0] == module for node in plain for alias in node.names)
    if not used or bound:
        return text
    later = [node for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    line = later[0].lineno - 1 if later else 0
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:line], f"import {module}\n", *lines[line:]])


def _inside_strings(source: str) -> set[int]:
    """The lines that begin inside of a string."""
    found: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begun.append(token.start[0])
        elif kind in ("FSTRING_END", "STRING"):
            first = begun.pop() if kind == "FSTRING_END" else token.start[0]
            found.update(range(first + 1, token.end[0] + 1))
    return found
