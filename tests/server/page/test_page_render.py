"""The renderer of Markdown by itself, in the browser that runs it: what becomes of a text, that a
text which grows ends like one that came whole, and that none takes long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from http_fixtures import make_app, serve
from scripted_engine import ScriptedEngine
from toy_tokenizer import toy_tokenizer

pytestmark = pytest.mark.slow

WHOLE = """async (text) => {
  const { drawMarkdown } = await import('/page/markdown.js');
  const element = document.createElement('div');
  drawMarkdown(element, text);
  for (const head of element.querySelectorAll('.code-head')) head.remove();
  return element.innerHTML;
}"""
GROWN = """async ([text, cuts]) => {
  const { MarkdownView } = await import('/page/markdown.js');
  const element = document.createElement('div');
  const view = new MarkdownView(element);
  for (const cut of cuts) view.update(text.slice(0, cut));
  view.update(text);
  view.finish();
  for (const head of element.querySelectorAll('.code-head')) head.remove();
  return element.innerHTML;
}"""
MILLISECONDS = """async ([text, steps]) => {
  const { MarkdownView } = await import('/page/markdown.js');
  const element = document.createElement('div');
  document.body.append(element);
  const began = performance.now();
  const view = new MarkdownView(element);
  for (let step = 1; step < steps; step += 1) {
    view.update(text.slice(0, Math.floor(text.length * step / steps)));
  }
  view.update(text);
  view.finish();
  element.getBoundingClientRect();
  const spent = performance.now() - began;
  element.remove();
  return spent;
}"""
PIECES = [
    "a", "b ", "\n", "\n\n", "# ", "#", "- ", "  - ", "1. ", "2) ", "```", "```py\n", "~~~", "> ",
    "| a | b |\n", "|---|:-:|\n", "|", "**", "*", "_", "`", "[x](https://e.example)", "[", "](",
    ")", "---", "***\n", "\\", "&amp;", "<br>", "<b>", "    ", "\t", "https://e.example/a?b", "~~",
    "é🦊", "$", "$$", "\\(", "\\)", "\\[", "\\]",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    with serve(make_app(ScriptedEngine(toy_tokenizer()))) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("html[data-ready]", state="attached")
        page.evaluate("""async () => {
          await (await import('/page/formulas.js')).loadFormulas();
          await (await import('/page/colours.js')).loadColours();
        }""")
        yield page
        context.close()


def code(text: str, name: str = "Code") -> str:
    lines = "".join(f'<span class="chunk">{text}</span>') if text.endswith("\n") else text
    return (
        f'<div class="code"><pre tabindex="0" aria-label="{name}"><code>{lines}</code></pre></div>'
    )


CASES = {
    "**a** _b_ *c* ~~d~~": "<p><strong>a</strong> <em>b</em> <em>c</em> <del>d</del></p>",
    "***a*** **b*c*d**": "<p><em><strong>a</strong></em> <strong>b<em>c</em>d</strong></p>",
    "snake_case_name 2 * 3 * 4": "<p>snake_case_name 2 * 3 * 4</p>",
    "**open": "<p>**open</p>",
    "`a *b*` ``c ` d``": "<p><code>a *b*</code> <code>c ` d</code></p>",
    "\\*a\\* &lt;b&gt; a<br>b": "<p>*a* &lt;b&gt; a<br>b</p>",
    "x\\) \\[y\\) $5 or $6 \\(": "<p>x\\) \\[y\\) $5 or $6 \\(</p>",
    "\\(\\frac\\)": '<p><span class="formula">\\(\\frac\\)</span></p>',
    "<b onclick=x>": "<p>&lt;b onclick=x&gt;</p>",
    "# A #\n## B\n####### c": "<h3>A</h3><h4>B</h4><p>####### c</p>",
    "a\n---\nb": "<p>a</p><hr><p>b</p>",
    "- a\n- b\n  1. c\n  2. d": "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "```\na\n```": code("a\n"),
    "~~~\n```\n~~~": code("```\n"),
    "```py\na": code("a", "Code, py"),
    "[a](javascript:alert(1))": '<p><span title="javascript:alert(1)">a</span></p>',
    "[a](JaVaScRiPt:alert)": '<p><span title="JaVaScRiPt:alert">a</span></p>',
    "[a](data:text/html,x) <javascript:x>": '<p><span title="data:text/html,x">a</span> '
    "&lt;javascript:x&gt;</p>",
    "[a](//e.example) [b](/v1/x) [c](#d)": '<p><span title="//e.example">a</span> '
    '<span title="/v1/x">b</span> <span title="#d">c</span></p>',
}


@pytest.mark.parametrize("text", CASES, ids=repr)
def test_a_text_becomes(page: Any, text: str) -> None:
    assert page.evaluate(WHOLE, text) == CASES[text]


def test_tables_have_their_cells_and_sides(page: Any) -> None:
    drawn = page.evaluate(WHOLE, "| a | b\\|c |\n|:--|--:|\n| 1 |\n| 2 | **3** | 4 |\n\nend")
    assert drawn.count("<tr>") == 3 and drawn.count("<td") == 4
    assert '<th class="to-right">b|c</th>' in drawn
    assert '<td class="to-right"><strong>3</strong></td>' in drawn and drawn.endswith("<p>end</p>")


@pytest.mark.parametrize(
    "url", ["https://e.example/a_(b)", "http://e.example", "mailto:a@b.example"]
)
def test_links_lead_out_and_tell_nothing(page: Any, url: str) -> None:
    drawn = page.evaluate(WHOLE, f'[a]({url} "t") ![p]({url}) <{url}>')
    assert drawn.count('target="_blank" rel="noopener noreferrer nofollow"') == 3
    assert drawn.count(f'<a href="{url}') == 3 and "<img" not in drawn


@pytest.mark.parametrize("seed", range(200))
def test_a_text_that_grows_ends_like_one_that_came_whole(page: Any, seed: int) -> None:
    noise = random.Random(seed)
    text = "".join(noise.choice(PIECES) for _ in range(noise.randrange(5, 60)))
    cuts = sorted(noise.randrange(len(text) + 1) for _ in range(noise.randrange(1, 25)))
    assert page.evaluate(GROWN, [text, cuts]) == page.evaluate(WHOLE, text), (text, cuts)


@pytest.mark.parametrize(
    "text",
    [
        "*a " * 30_000, "**a " * 20_000, "_a* " * 20_000, "`" * 50_000, "` `` " * 20_000,
        "[" * 50_000, "[a](" * 20_000, "![" * 30_000, "<https://" * 10_000, "https://a " * 10_000,
        "> " * 20_000, "- " * 20_000, "  " * 30_000 + "- a", "#" * 60_000, "# " + "# " * 30_000,
        "|" * 50_000 + "\n" + "|-" * 25_000, "| a\n" * 10_000, "- a\n" * 10_000, "a\n" * 30_000,
        "```" + " " * 60_000 + "`", "- - " * 15_000, "\\" * 60_000, "&" * 60_000,
        "1. a\n\n" * 5_000, "&amp;" * 12_000, "~~a" * 20_000, "***a" * 15_000, "x" * 200_000,
        "<" * 60_000, "\\(" * 25_000, "$a " * 20_000, "$$a" * 20_000, "\\[\n" * 15_000,
    ],
    ids=lambda text: repr(text[:8]),
)  # fmt: skip
def test_no_text_takes_long(page: Any, text: str) -> None:
    assert page.evaluate(MILLISECONDS, [text, 1]) < 1500


@pytest.mark.parametrize(
    ("part", "times"),
    [
        ("A paragraph of **some** words and `code`.\n\n", 8000),
        ("```py\n" + "x = [1, 2, 3]  # and a comment\n" * 50 + "```\n\n", 150),
    ],
)
def test_a_very_long_answer_stays_smooth(page: Any, part: str, times: int) -> None:
    """Two thousand drawings of a text of a quarter of a megabyte: a few milliseconds each."""
    assert page.evaluate(MILLISECONDS, [part * times, 2000]) < 2000 * 8


def test_open_code_of_ten_thousand_lines_grows_by_what_is_new(page: Any) -> None:
    assert page.evaluate(MILLISECONDS, ["```\n" + "a line of code\n" * 10_000, 2000]) < 2000 * 4


@pytest.mark.parametrize(
    ("text", "display", "plain"),
    [
        ("\\(x^2\\)", 0, ""),
        ("It is $x^2$, for $5-$10.", 0, "$5-$10"),
        ("\\[\na\n+ b\n- c\n\\]\nend", 1, "end"),
        ("- so\n\n  $$\n  a\n  $$", 1, "so"),
        ("`$x$` then \\[\\boxed{\\text{a}}\\]", 1, "$x$"),
    ],
)
def test_formulas_are_drawn(page: Any, text: str, display: int, plain: str) -> None:
    drawn = page.evaluate(WHOLE, text)
    assert drawn.count('class="katex"') == 1 and drawn.count("katex-display") == display
    assert plain in drawn and drawn.count("<ul>") == text.startswith("- ")


def test_no_formula_loads_or_links_anything(page: Any) -> None:
    text = "\\(\\href{https://e.example}{a}\\) $\\includegraphics{https://e.example/p.png}$"
    drawn = page.evaluate(WHOLE, f"{text} $\\htmlClass{{a}}{{b}}$ $\\def\\a{{\\a\\a}}\\a$")
    assert "<a " not in drawn and "<img" not in drawn and 'class="a"' not in drawn


def test_code_of_a_known_language_has_colours_and_its_text(page: Any) -> None:
    text = 'x = """' + "\n<b>&amp;\n" * 120 + '"""\nif x: pass\n'
    drawn = page.evaluate(WHOLE, f"```py\n{text}```\n\n```nothing\nif\n```")
    assert drawn.count('class="chunk"') == 4 and '<span class="hljs-keyword">if</span>' in drawn
    assert drawn.count("hljs-string") == 3 and "<b>" not in drawn
    assert text.count("&amp;") == drawn.count("&amp;amp;")
