"""Refuse docstrings, messages and names that a native reader would have to translate (see docs/glossary.md)."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tools.check_sizes import own_files

VERBS = frozenset((Path(__file__).parent / "docstring_verbs.txt").read_text().split())
HTTP_METHODS = ("GET", "POST", "PUT", "DELETE")

# No docstring begins with these, whatever it describes.
FRAGMENT_STARTS = frozenset(
    "as how nobody of so somebody such that those what whatever when where whether which who whoever whom why".split()
)

# Programs and messages do not speak or wish, and these words have a plainer one.
REFUSED_WORDS = re.compile(
    r"\b(hear|hears|heard|hearing|say|says|said|saying|tell|tells|told|telling|want|wants|wanted|wanting|know|knows|knew"
    r"|welcome|welcomes|welcomed|somebody|nobody|somebody's|nobody's|whoever|whom|whosoever|foresee|foresees|foreseen"
    r"|foresight|lest|thereof|whereof|hereby|therein|boards|boarding|enrol|enrols|enrolled"
    r"|(?:is|are|be|was|were|been) had|stands? in line|had better|under way|asks? for nothing|token 0|token zero)\b",
    re.IGNORECASE,
)

# In documentation people may speak, so fewer words are refused there.
REFUSED_IN_DOCS = re.compile(
    r"\b(hears|heard|welcomes|welcomed|whosoever|foresees|foreseen|thereof|whereof|boards|boarding|enrols"
    r"|(?:is|are|be|was|were|been) had|stands? in line|asks? for nothing|token 0|token zero)\b",
    re.IGNORECASE,
)

# Names that were replaced by the field's standard terms.
RETIRED_NAMES = re.compile(
    r"\b(Wish|Patience|WaitingLine|waiting_line|side_by_side|Relays?|_enrol|_welcome|has_news|hear_finished|is_under_way"
    r"|Boarding|SendDesk|FetchDesk|is_turning|Rung|Foresight|nixl_owner|Visit|strangers|let_go|cut_short"
    r"|give_way|Lending|GrantBook|JoinedRanks|RanksConnectorFactory|create_ranks_connector|turn_kernel|has_answers_only"
    r"|FewRows|few_rows|draft_next|router/link|worker\.link)\b"
)

IRREGULAR_PARTICIPLES = frozenset(
    "begun bought bound broken brought built caught chosen dealt done drawn driven eaten fallen felt forgotten fought found"
    " frozen given gone got grown heard held hidden kept known laid led lent lost made met paid ridden seen sent shown shut"
    " slept sold spent spoken stolen stood struck swept sworn taught thought thrown told understood woken won worn wound"
    " written".split()
)
VERBS_IN_ED = frozenset("bleed embed feed need seed shed".split())
"""Verbs that look like a participle."""

RETIRED_IDENTIFIERS = {"asked": "request"}
"""Names in the product that said little; each with the word to begin from. In sentences the words are allowed."""

DOC_COLUMNS = 100
DOC_LINES = 8
"""The longest paragraph: a reader finds nothing in a longer one."""
_NO_PARAGRAPH = re.compile(r"\s*$|[|#<>-]|\* |  |\d+\. ")
"""A line that ends a paragraph, or belongs to a table, a heading or a list."""
HISTORY = "docs/log.md"

Problem = tuple[int, str]


def problems_of_code(source: str, is_test: bool, *, is_product: bool = True) -> Iterator[Problem]:
    """Yield (line, what is wrong) for one Python file; tests may name a fixture by a noun."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_test:
            yield from _problems_of_function(node, is_product=is_product)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from _problems_of_docstring(node.lineno, node.value.value)
        elif isinstance(node, ast.Name | ast.Attribute | ast.arg) and is_product and not is_test:
            name = (
                node.id
                if isinstance(node, ast.Name)
                else node.attr
                if isinstance(node, ast.Attribute)
                else node.arg
            )
            if name.lstrip("_") in RETIRED_IDENTIFIERS:
                better = RETIRED_IDENTIFIERS[name.lstrip("_")]
                yield (
                    node.lineno,
                    f"the name {name!r} was retired; what it holds is a {better}, a time, or the like",
                )
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _logs_or_helps(node)):
            for line, text in _texts(node):
                yield from _refused_words(line, text, REFUSED_WORDS)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _refused_words(token.start[0], token.string, REFUSED_WORDS)
    yield from _retired_names(source)


def problems_of_document(text: str) -> Iterator[Problem]:
    """Yield (line, what is wrong) for one Markdown file; tables and code may be wider than paragraphs."""
    is_code = is_names = False
    num_lines = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
            num_lines = 0
        elif not is_code:
            if len(line) > DOC_COLUMNS and not line.lstrip().startswith(("|", "[", "http", "![")):
                yield number, f"{len(line)} columns; paragraphs are wrapped at {DOC_COLUMNS}"
            is_names = bool(line) and (is_names or line.startswith("**Mutants.**"))
            num_lines = 0 if is_names or _NO_PARAGRAPH.match(line) else num_lines + 1
            if num_lines == DOC_LINES + 1:
                yield number, f"a paragraph has at most {DOC_LINES} lines"
            yield from _refused_words(number, line, REFUSED_IN_DOCS)
    yield from _retired_names(text)


def is_verb(word: str) -> bool:
    """Return whether ``word`` is a verb of the list, in its base form or in the third person."""
    stem = word.lower()
    bases = {stem, stem.removesuffix("s"), stem.removesuffix("es")}
    if stem.endswith("ies"):
        bases.add(stem.removesuffix("ies") + "y")
    return not VERBS.isdisjoint(bases)


def _problems_of_docstring(line: int, text: object) -> Iterator[Problem]:
    """Check a string that is a statement: the docstring of a module, class or function, or that of a constant or field."""
    if isinstance(text, str):
        first = _first_word(text)
        if first.lower() in FRAGMENT_STARTS:
            yield line, f"a docstring begins with {first!r}; write a sentence"
        yield from _refused_words(line, text, REFUSED_WORDS)


def _problems_of_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_product: bool
) -> Iterator[Problem]:
    first = _first_word(ast.get_docstring(node) or "")
    is_allowed = first.lower() in FRAGMENT_STARTS or first in ("", *HTTP_METHODS) or is_verb(first)
    if not _is_property(node) and not is_allowed:
        yield (
            node.body[0].lineno,
            f"the docstring of {node.name} begins with {first!r}, which is no verb of docstring_verbs.txt",
        )
    if is_product:
        yield from _problems_of_name(node)


def _problems_of_name(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Problem]:
    """Check the name of a function: an action is a verb, an event handler ``on_x``.

    A participle may name what a function returns, as ``sorted`` does: then the docstring begins with "Return" or "Yield".
    """
    word = node.name.strip("_").split("_")[0]
    if word in ("take", "taken"):
        yield (
            node.lineno,
            f"the name {node.name!r} does not say what happens: pop, get, drain, read, on_output or the like",
        )
        return
    is_participle = word in IRREGULAR_PARTICIPLES or (word.endswith("ed") and word not in VERBS_IN_ED)
    if not is_participle or _is_property(node):
        return
    returned = "" if node.returns is None else ast.unparse(node.returns)
    first = _first_word(ast.get_docstring(node) or "Return")
    if first not in ("Return", "Yield") or re.fullmatch(r"(\w*Iterator\[)?None\]?|NoReturn", returned):
        yield (
            node.lineno,
            f"the name {node.name!r} is a participle; name an action by its verb, a handler on_x",
        )


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _first_word(text: str) -> str:
    return re.split(r"[\s,.:;]", text.strip(), maxsplit=1)[0]


def _logs_or_helps(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return name.split(".")[0].lower().strip("_") in ("logger", "log") or any(
        keyword.arg == "help" for keyword in call.keywords
    )


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, part.value


def _refused_words(line: int, text: str, words: re.Pattern[str]) -> Iterator[Problem]:
    for match in words.finditer(re.sub(r"``?[^`]*``?", "", text)):
        yield line, f"{match.group()!r} is refused: write what happens in plain words"


def _retired_names(text: str) -> Iterator[Problem]:
    for number, line in enumerate(text.splitlines(), 1):
        for match in RETIRED_NAMES.finditer(line):
            yield number, f"the name {match.group()!r} was retired"


def main(root: Path, chosen: list[str]) -> int:
    """Check every file below ``root``, or those whose path begins with one of ``chosen``; return the exit code."""
    code = [file.relative_to(root) for file in own_files(root)]
    documents = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    problems = []
    for path in [*code, *(file.relative_to(root) for file in documents)]:
        name = str(path)
        if name == HISTORY or name.startswith("tools/check_language") or not _is_chosen(name, chosen):
            continue
        text = (root / path).read_text()
        found = (
            problems_of_document(text)
            if path.suffix == ".md"
            else problems_of_code(
                text, name.startswith("tests/"), is_product=not name.startswith("benchmarks/")
            )
        )
        problems += [f"{name}:{line}: {problem}" for line, problem in sorted(found)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _is_chosen(name: str, chosen: list[str]) -> bool:
    return not chosen or any(name.startswith(start) for start in chosen)


if __name__ == "__main__":
    sys.exit(main(Path(), sys.argv[1:]))
