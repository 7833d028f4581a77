"""The C++ and C reference: Doxygen reads the public headers, this makes Markdown of its XML, in the headers' order.

A page of docs/reference asks for a header by the line `<!-- header: attention.h -->`.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
HEADERS = PROJECT / "include" / "anyflash"
ASKS = re.compile(r"^<!-- header: (\S+) -->$", re.M)
_KINDS = {"function", "enum", "typedef", "variable", "define", "struct", "class"}
_HIDDEN = ("detail", "rules", "std")  # namespaces
_INCLUDE_GUARD = "ANYFLASH_C_API_H"
_OPERATORS = {"operator&": "operator-and", "operator|": "operator-or", "operator~": "operator-not"}


@dataclass
class Item:
    """A function, a type, a member or a constant of a public header."""

    id: str
    kind: str
    name: str
    header: str
    line: int
    code: str
    description: list[ET.Element]
    members: list[Item] = field(default_factory=list)

    @property
    def documented(self) -> bool:
        return any("".join(part.itertext()).strip() for part in self.description)

    @property
    def anchor(self) -> str:
        return _OPERATORS.get(self.name, self.name.replace("~", "not-"))


def run_doxygen() -> Path:
    """The folder of the XML that it wrote. Raises RuntimeError with its warnings, if it has any."""
    folder = PROJECT / "build-docs" / "doxygen"
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["doxygen", "docs/site/Doxyfile"], cwd=PROJECT, capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RuntimeError(f"doxygen: {done.stderr or done.stdout}")
    return folder / "xml"


class Headers:
    """All that the public headers declare, from Doxygen's XML."""

    def __init__(self, folder: Path) -> None:
        self.items: list[Item] = []
        for entry in ET.parse(folder / "index.xml").getroot():
            name = entry.findtext("name") or ""
            if entry.get("kind") in ("struct", "class", "namespace", "file") and name.split("::")[-1] not in _HIDDEN:
                if not any(f"{hidden}::" in name for hidden in _HIDDEN):
                    (compound,) = ET.parse(folder / f"{entry.get('refid')}.xml").getroot()
                    self._read(compound)
        self.items = list({item.id: item for item in self.items}.values())
        self.items.sort(key=lambda item: (item.header, item.line))
        self.pages: dict[str, str] = {}  # of each header, its page

    def _read(self, compound: ET.Element) -> None:
        members = [item for one in compound.iter("memberdef") if (item := _member(one))]
        if compound.get("kind") in ("namespace", "file"):
            self.items += members
            return
        name = (compound.findtext("compoundname") or "").split("::")[-1]
        header, line = _place(compound)
        kind = compound.get("kind") or ""
        members.sort(key=lambda item: item.line)
        inner = [member for member in members if member.members]
        self.items += [replace(one, name=f"{name}::{one.name}", code=f"enum {name}::{one.name}") for one in inner]
        members = [member for member in members if member not in inner and not _internal(member)]
        self.items.append(
            Item(compound.get("id") or "", kind, name, header, line, f"{kind} {name}", _description(compound), members)
        )

    @cached_property
    def by_id(self) -> dict[str, Item]:
        """Members too: a link to one leads to its type."""
        return {one.id: item for item in self.items for one in (item, *item.members)}

    def of(self, header: str) -> list[Item]:
        return [item for item in self.items if item.header == header]

    def cpp_twin(self, item: Item, name: str) -> Item | None:
        """The C++ counterpart of something in C, by its name."""
        plain = re.sub(r"^anyflash_(rule_)?", "", name)
        wanted = {plain, "".join(map(str.capitalize, plain.split("_")))}
        wanted |= {f"Forward{plain.capitalize()}"}  # anyflash_outputs
        return next(
            (
                one
                for one in self.items
                if one.name in wanted
                and one.header != "c_api.h"
                and (one.kind == item.kind or not {one.kind, item.kind} & {"function", "enum"})
            ),
            None,
        )

    def markdown(self, header: str, page: str) -> str:
        """The reference of a header, for the page at this address (relative to docs)."""
        parts: list[str] = []
        before: Item | None = None
        headings = _headings(header)
        parts.append(_introduction(header))
        for item in self.of(header):
            while headings and headings[0][0] < item.line:
                parts.append(f"## {headings.pop(0)[1]}")
            if before is None or before.name != item.name:
                level = "###" if header == "c_api.h" else "##"
                parts.append(f"{level} `{item.name}` {{: #{item.anchor} }}")
            parts.append(self._item(item, page))
            before = item
        return "\n\n".join(parts)

    def _item(self, item: Item, page: str) -> str:
        parts = []
        if item.kind in ("function", "typedef", "variable", "define") or not item.members:
            parts.append(_fence(item.code))
        text = self.text(item.description, page)
        twin = self.cpp_twin(item, item.name) if item.header == "c_api.h" else None
        if twin is not None:
            link = f"[`anyflash::{twin.name}`]({self._address(twin, page)})"
            if not item.documented:
                text = self.text(twin.description, page)
            text = f"{text}\n\nIn C++: {link}.".strip()
        parts.append(text)
        functions = [member for member in item.members if member.kind == "function"]
        rows = [self._row(member, twin, page) for member in item.members if member.kind != "function"]
        if rows and all(row.endswith("|  |") for row in rows):
            ends = "," if item.kind == "enum" else ";"
            names = "".join(f"  {member.code}{ends}\n" for member in item.members if member not in functions)
            parts.append(_fence(f"{item.code} {{\n{names}}};"))
        elif rows:
            head = [f"| {'value' if item.kind == 'enum' else 'member'} | meaning |", "|---|---|"]
            parts.append("\n".join(['<div class="members" markdown>', "", *head, *rows, "", "</div>"]))
        for member in functions:
            parts += [_fence(member.code), self.text(member.description, page)]
        return "\n\n".join(part for part in parts if part)

    def _row(self, member: Item, twin: Item | None, page: str) -> str:
        text = self.text(member.description, page)
        if not text and twin is not None:
            name = member.name.removeprefix("ANYFLASH_").lower()
            text = next((self.text(one.description, page) for one in twin.members if one.name == name), "")
        return f"| `{member.code}` | {text.replace(chr(10) * 2, '<br>').replace(chr(10), ' ')} |"

    def _address(self, item: Item, page: str) -> str:
        target = self.pages.get(item.header, page)
        return f"{'' if target == page else Path(target).name}#{item.anchor}"

    # Doxygen's descriptions as Markdown.

    def text(self, description: list[ET.Element], page: str) -> str:
        blocks = [block for part in description for para in part for block in self._blocks(para, page)]
        return "\n\n".join(block for block in blocks if block.strip())

    def _blocks(self, para: ET.Element, page: str) -> list[str]:
        blocks, line = [], _escaped(para.text)
        for child in para:
            if child.tag in ("itemizedlist", "orderedlist", "verbatim", "preformatted", "programlisting", "table"):
                blocks += [line.strip(), self._block(child, page)]
                line = ""
            elif child.tag == "simplesect":
                blocks += [line.strip(), *(block for one in child for block in self._blocks(one, page))]
                line = ""
            else:
                line += self._inline(child, page)
            line += _escaped(child.tail)
        return [*blocks, line.strip()]

    def _block(self, element: ET.Element, page: str) -> str:
        if element.tag in ("itemizedlist", "orderedlist"):
            mark = "-   " if element.tag == "itemizedlist" else "1.  "
            texts = [self.text([item], page) for item in element]
            return "\n".join(mark + textwrap.indent(text, "    ")[4:] for text in texts)
        if element.tag == "table":
            rows = [[self.text([cell], page) for cell in row] for row in element.iter("row")]
            rows.insert(1, ["---"] * len(rows[0]))
            return "\n".join("| " + " | ".join(row) + " |" for row in rows)
        return _fence("".join(element.itertext()).strip("\n"))

    def _inline(self, element: ET.Element, page: str) -> str:
        if element.tag == "computeroutput":
            return f"`{''.join(element.itertext())}`"
        inside = _escaped(element.text) + "".join(self._inline(one, page) + _escaped(one.tail) for one in element)
        if element.tag == "ref" and element.get("refid") in self.by_id:
            return f"[{inside}]({self._address(self.by_id[element.get('refid') or ''], page)})"
        if element.tag == "ulink":
            return f"[{inside}]({element.get('url')})"
        return {"bold": f"**{inside}**", "emphasis": f"*{inside}*", "ndash": "--"}.get(element.tag, inside)


def _place(element: ET.Element) -> tuple[str, int]:
    location = element.find("location")
    return ("", 0) if location is None else (Path(location.get("file") or "").name, int(location.get("line") or 0))


def _description(element: ET.Element) -> list[ET.Element]:
    return [part for tag in ("briefdescription", "detaileddescription") if (part := element.find(tag)) is not None]


def _member(element: ET.Element) -> Item | None:
    name, kind = element.findtext("name") or "", element.get("kind") or ""
    kind = "function" if kind == "friend" else kind
    header, line = _place(element)
    if kind not in _KINDS or element.get("prot") == "private" or name == _INCLUDE_GUARD:
        return None
    members = [
        Item(
            value.get("id") or "",
            "value",
            value.findtext("name") or "",
            header,
            line,
            f"{value.findtext('name')} {value.findtext('initializer') or ''}".strip(),
            _description(value),
        )
        for value in element.findall("enumvalue")
    ]
    code = _code(element, name, kind)
    return Item(element.get("id") or "", kind, name, header, line, code, _description(element), members)


def _internal(member: Item) -> bool:
    """Is it for the library alone, or what every class has?"""
    return "rules::" in member.code or "detail::" in member.code or member.code.endswith("= default;")


def _code(element: ET.Element, name: str, kind: str) -> str:
    """The declaration as the header has it, a line for each parameter where it is long."""
    value = element.find("initializer")
    value = "" if value is None else " ".join("".join(value.itertext()).split())
    if kind in ("define", "enum"):
        return f"#define {name} {value}" if kind == "define" else f"enum {name}"
    types = [one.findtext("type") or "" for one in element.findall("templateparamlist/param")]
    text = "".join(f"template <{one}>\n" for one in types) + (element.findtext("definition") or "")
    text = re.sub(rf"(\w+::)+(?={re.escape(name)}(\[|$))", "", text)  # the names of its owners
    text += f" {value}" if kind == "variable" else element.findtext("argsstring") or ""
    text = re.sub(r"\s*([&*]+) (?=\w|$)|\s+([&*]+)(?=\w|$)", lambda match: (match[1] or match[2]) + " ", text)
    for wide, plain in (("anyflash::", ""), ("= typedef ", "= "), ("< ", "<"), (" >", ">")):
        text = text.replace(wide, plain)
    text = re.sub(r"(?<![ =<>!])=(?![ =])", " = ", text).strip()
    if kind == "function" and len(text) > 80:
        head, arguments = text.split("(", 1)
        arguments, tail = arguments.rsplit(")", 1)
        text = f"{head}(\n    " + ",\n    ".join(_split(arguments)) + f"){tail}"
    return text if kind == "variable" else f"{text};"


def _split(arguments: str) -> list[str]:
    """At commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += (letter in "<({") - (letter in ">)}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _headings(header: str) -> list[tuple[int, str]]:
    """(line, text) of the lines of dashes that part a header."""
    lines = (HEADERS / header).read_text().splitlines()
    found = [(number, re.match(r"/\* --- (.*?) -+ \*/", line)) for number, line in enumerate(lines, 1)]
    return [(number, match[1].capitalize()) for number, match in found if match]


def _introduction(header: str) -> str:
    """The comment that a header begins with."""
    text = (HEADERS / header).read_text()
    comment = re.match(r"((?://.*\n)+)|/\*((?:.|\n)*?)\*/", text)
    lines = re.sub(r"^(//| \*) ?", "", (comment[1] or comment[2]).strip(), flags=re.M) if comment else ""
    return re.sub(r"(`.*?`)|([^`]+)", lambda match: match[1] or _escaped(match[2]), lines)


def _escaped(text: str | None) -> str:
    return re.sub(r"([\\*_`\[\]|])", r"\\\1", text or "").replace("<", "&lt;")


def _fence(code: str) -> str:
    return f"```cpp\n{code}\n```"
