"""Reads public headers: comments and declarations, by a scanner that knows as much C++ as they need.

For scripts/api_reference, whose first comment says what is left out.
"""
import re
import sys


# A comment, a string, a number with its separators, a character, or any one character.
TOKEN = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\])*\"|\b\d[\d'.]*|'(?:\\.|[^'\\])'|.", re.S)


class Group:
    """A comment and the declarations directly below it, down to a blank line or the next comment."""

    def __init__(self, comment, after_blank):
        self.comment, self.after_blank, self.declarations = comment, after_blank, []


class Declaration:
    """`text` is without its body, `members` are the groups of a class or struct, `trailing` is the comment behind."""

    def __init__(self, kind, name, text, members=()):
        self.kind, self.name, self.text, self.members, self.trailing = kind, name, text, members, []


class Header:
    """The declarations of a header, by a scanner that knows as much C++ as public headers need."""

    def __init__(self, path):
        self.path, self.text, self.at = path, path.read_text(), 0
        self.comment = self.comment_lines()
        self.scopes = []  # (namespace, groups)
        self.read_namespace("")

    def fail(self, what, at):
        sys.exit(f"api_reference: {self.path}:{self.text.count(chr(10), 0, at) + 1}: {what}")

    def starts(self, pattern):
        return re.compile(pattern).match(self.text, self.at)

    def column(self, at):
        return at - (self.text.rfind("\n", 0, at) + 1)

    def line_end(self):
        end = self.text.find("\n", self.at)
        return end if end >= 0 else len(self.text)

    def skip_blanks(self):
        """Returns how many line ends were skipped."""
        begin = self.at
        self.at = self.starts(r"\s*").end()
        return self.text.count("\n", begin, self.at)

    def comment_lines(self):
        """Of the comment that begins here, and of the lines below that begin in the same column."""
        column, lines = self.column(self.at), []
        while True:
            end = self.line_end()
            lines.append(re.sub(r"^ ?(NOLINT.*)?|\s+NOLINT.*", "", self.text[self.at + 2:end].rstrip()))
            self.at = end
            below = self.starts(r"\n *//")
            if not below or self.column(below.end() - 2) != column:
                return lines
            self.at = below.end() - 2

    def closed(self, at):
        """The position behind the bracket that closes the one at `at`."""
        depth, begin = 0, at
        while at < len(self.text):
            found = TOKEN.match(self.text, at)
            at = found.end()
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(found.group(), 0)
            if depth == 0:
                return at
        self.fail("a bracket is not closed", begin)

    def declaration_end(self):
        """Where the declaration here ends, and where its body begins (None: it has none)."""
        at = self.at
        while at < len(self.text):
            token = TOKEN.match(self.text, at)
            if token.group() == ";":
                return at + 1, None
            if token.group() == "{" and has_body(self.text[self.at:at]):
                return self.closed(at), at
            at = self.closed(at) if token.group() in "([{" else token.end()
        self.fail("a declaration does not end", self.at)

    def read_namespace(self, name):
        groups = []
        self.scopes.append((name, groups))
        self.read_scope(groups)

    def read_scope(self, groups, own="", public=True):
        """Fills `groups`, up to the end of the scope of the class `own` or of a namespace."""
        hidden = set()  # classes that are only declared
        fresh, blank = True, False  # the next declaration begins a group; behind a blank line
        while True:
            if self.skip_blanks() > 1:
                fresh = blank = True
            if self.at == len(self.text) or self.starts("}"):
                self.at = self.starts(r"(\}( *//[^\n]*)?)?").end()
                break
            if self.starts("//"):
                groups.append(Group(self.comment_lines(), blank))
                fresh = blank = False
            elif access := self.starts(r"(public|private|protected):(?!:)"):
                public, fresh, self.at = access.group(1) == "public", True, access.end()
            elif space := self.starts(r"namespace ([\w:]+) \{"):
                if space.group(1).endswith("internal"):
                    self.at = self.closed(space.end() - 1)
                    self.at = self.starts(r"( *//[^\n]*)?").end()
                else:
                    self.at = space.end()
                    self.read_namespace(space.group(1))
                fresh = True
            else:
                if fresh:
                    groups.append(Group([], blank))
                fresh = blank = False
                declaration = self.declaration(own, hidden)
                if declaration and public:
                    groups[-1].declarations.append(declaration)
                elif not groups[-1].declarations:  # the comment was that of something that is left out
                    groups[-1].comment, fresh = [], True
        groups[:] = [group for group in groups if group.declarations or group.comment]

    def declaration(self, own, hidden):
        """None for what is left out."""
        begin = self.at
        if self.starts("#"):
            self.at = self.line_end()
            if define := re.fullmatch(r"#define (\w+) .+", self.text[begin:self.at]):
                return Declaration("macro", define.group(1), define.group())
            if not re.match(r"#(pragma once|include)\b", self.text[begin:self.at]):
                self.fail("expected #include, #pragma once or #define NAME VALUE", begin)
            return None
        end, body = self.declaration_end()
        indent = self.column(begin)
        text = self.text[begin:end - 1 if body is None else body].rstrip()
        text = dedented(re.sub(r" *// NOLINT[^\n]*", "", text), indent)
        plain = without_template(text)
        made = None
        if match := re.match(r"(class|struct|enum class|enum) (\w+)", plain):
            kind, name = match.groups()
            if body is None:
                hidden.add(name)
            elif kind.startswith("enum"):
                text, self.at = dedented(self.text[begin:end], indent), end
                made = Declaration("enum", scoped(own, name), text + ";")
            else:
                made = Declaration(kind, scoped(own, name), text, [])
                self.at = body + 1
                self.read_scope(made.members, scoped(own, name), public=kind == "struct")
            end = self.at if body is not None else end
            end += body is not None and self.text[end] == ";"
        elif not is_left_out(plain, own.split("::")[-1], hidden):
            made = self.function_or_value(begin, text if body is None else without_initializers(text), plain)
        self.at = end
        self.trailing_comment(made)
        return made

    def function_or_value(self, begin, text, plain):
        flat = re.sub(r"^requires\s*\(.*?\)\s*\n|decltype\(auto\)", "", plain, flags=re.S)
        flat = without_angles(flat).strip()
        for kind, pattern in (("alias", r"TORCH_MODULE\((\w+)\)"), ("alias", r"using (?:[\w:]+::)?(\w+)(?: =|$)"), ("concept", r"concept (\w+)"),
                              ("function", r"[^=(]*?(operator\s?[^\s(]+|~?\w+)\s?\("),
                              ("value", r"[\w:&*\s]*?(\w+)(?:\s*[={,]|$)")):
            if match := re.match(pattern, flat):
                return Declaration(kind, match.group(1), text + ";")
        self.fail(f"not understood: {text}", begin)

    def trailing_comment(self, declaration):
        space = self.starts(" *")
        if self.text[space.end():space.end() + 2] == "//":
            self.at = space.end()
            lines = [line for line in self.comment_lines() if line]
            if declaration:
                declaration.trailing, declaration.gap = lines, space.end() - space.start()


def scoped(own, name):
    return f"{own}::{name}" if own else name


def dedented(text, columns):
    return "\n".join(line[columns:] if line[:columns].isspace() else line for line in text.split("\n"))


def without_template(text):
    """What follows template <...>."""
    if not text.startswith("template"):
        return text
    depth = 0
    for at, c in enumerate(text):
        depth += {"<": 1, ">": -1}.get(c, 0)
        if c == ">" and depth == 0:
            return text[at + 1:].lstrip()
    return text


def without_angles(text):
    """Without template arguments; operators keep their names."""
    text = re.sub(r"operator[<>=!]+", lambda match: match.group().replace("<", "lt").replace(">", "gt"), text)
    while text != (text := re.sub(r"<[^<>;]*>", "", text)):
        pass
    return text


def outside_of_brackets(text):
    """`f(int a = 0) const` -> `f() const`."""
    depth, kept = 0, ""
    for c in text:
        depth -= c in ")]}"
        kept += c if depth == 0 else ""
        depth += c in "([{"
    return kept


def has_body(head):
    """Whether a brace behind it begins a body; else a value."""
    plain = without_template(head.strip())
    if re.match(r"(class|struct|enum)\b", plain):
        return True
    outside = outside_of_brackets(re.sub(r"operator\s?[^\s(]+", "operator", plain))
    return "(" in outside and "=" not in outside


def without_initializers(text):
    """`Name(int a) : a_(a)` -> `Name(int a)`."""
    depth = 0
    for at, c in enumerate(text):
        depth += {"(": 1, ")": -1}.get(c, 0)
        if c == ")" and depth == 0 and (match := re.match(r"\)\s*:\s(?!:)", text[at:])):
            return text[:at + 1]
    return text


def is_left_out(plain, own, hidden):
    if re.match(r"friend |static_assert|using (iterator_category|value_type|difference_type|pointer|reference) =", plain):
        return True
    if re.match(r"using .*?(\w+)::\1$", plain):  # constructors of a base
        return True
    if re.search(r"= delete$", plain) or re.match(rf"(virtual )?~{own}\(\)( = default)?( override)?$", plain):
        return True
    if own and re.match(rf"(explicit )?{own}\(", plain):
        named = set(re.findall(r"\w+", plain)) - {own}
        return plain.endswith("= default") or bool(named & hidden)
    return False
