// Markdown within a line: text to DOM nodes. Text is never read as HTML, links lead to http(s) and
// mailto alone, and pictures become links, for a picture would tell its host who reads.

import { h } from './dom.js';
import { formula } from './formulas.js';

const MOST_URL = 2048;
const MOST_NESTED = 12;
const MOST_FORMULA = 2000;
/** `$` begins one where a price would not: no blank inside, and no digit behind it. */
const DOLLARS = /^\$\$([^$]+)\$\$|^\$(?![\s$])([^$\n]*[^\s$\\])\$(?!\d)/;
/** Characters from which a text is shown as it is: it is no prose. */
const MOST_TEXT = 50_000;
const SCHEMES = new Set(['http:', 'https:', 'mailto:']);
const SIGNS = /[\\`*_~[!<&$]|https?:\/\//g;
const ENTITIES = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0', '#39': "'" };
const TAGS = { '*': 'em', _: 'em', '**': 'strong', __: 'strong', '~~': 'del' };

/** The nodes of a text. */
export function inlineNodes(text) {
  return text.length > MOST_TEXT ? [text] : parse(text, true);
}

function parse(text, links) {
  const out = [{ mark: null, nodes: [] }];
  const runs = backtickRuns(text);
  const ends = links ? bracketEnds(text) : new Map();
  let at = 0;
  while (at < text.length) {
    SIGNS.lastIndex = at;
    const next = SIGNS.exec(text)?.index ?? text.length;
    if (next > at) put(out, text.slice(at, next));
    at = next;
    if (at >= text.length) break;
    const [node, end] = special(text, at, runs, ends, links) ?? [];
    if (node !== undefined) {
      put(out, node);
      at = end;
    } else if ('*_~'.includes(text[at])) {
      at = emphasis(text, at, out);
    } else {
      put(out, text[at]);
      at += 1;
    }
  }
  while (out.length > 1) unwind(out);
  return out[0].nodes;
}

/** Add a node to what is open; texts that follow each other become one. */
function put(out, node) {
  const { nodes } = out.at(-1);
  if (typeof node === 'string' && typeof nodes.at(-1) === 'string') nodes[nodes.length - 1] += node;
  else nodes.push(node);
}

/** What begins at a sign and is no emphasis: its node and its end. */
function special(text, at, runs, ends, links) {
  switch (text[at]) {
    case '\\':
      if ('()[]'.includes(text[at + 1] || ' ')) return bracketed(text, at);
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? '') ? [text[at + 1], at + 2] : null;
    case '$': return dollars(text, at);
    case '`': return codeAt(text, at, runs);
    case '&': {
      const found = /^&([a-z]{2,4}|#39);/.exec(text.slice(at, at + 7));
      return found && Object.hasOwn(ENTITIES, found[1])
        ? [ENTITIES[found[1]], at + found[0].length] : null;
    }
    case '<': {
      const found = /^<(?:br ?\/?|((?:https?:\/\/|mailto:)[^\s<>]{1,2000}))>/.exec(
        text.slice(at, at + 2020));
      if (!found) return null;
      const node = found[1] ? link(found[1], [found[1]]) : h('br');
      return [node, at + found[0].length];
    }
    case '!': return text[at + 1] === '[' ? linkAt(text, at + 1, ends) : null;
    case '[': return linkAt(text, at, ends);
    case 'h': return links ? bareUrl(text, at) : null;
    default: return null;
  }
}

/** `\(a\)` and `\[a\]`; the sign as it is where no formula begins. */
function bracketed(text, at) {
  const sign = text.slice(at, at + 2);
  const close = { '\\(': '\\)', '\\[': '\\]' }[sign];
  const rest = text.slice(at + 2, at + 2 + MOST_FORMULA);
  const end = close ? rest.indexOf(close) : -1;
  if (end < 0 || !rest.slice(0, end).trim()) return [sign, at + 2];
  const source = text.slice(at, at + end + 4);
  return [formula(rest.slice(0, end), source, close === '\\]'), at + source.length];
}

function dollars(text, at) {
  const found = DOLLARS.exec(text.slice(at, at + MOST_FORMULA));
  if (!found) return null;
  const [source, display, within] = found;
  return [formula(display ?? within, source, display !== undefined), at + source.length];
}

function codeAt(text, at, runs) {
  let length = 1;
  while (text[at + length] === '`') length += 1;
  const run = runs.get(length);
  // A run that begins behind a backslash is none of these.
  if (!run) return ['`'.repeat(length), at + length];
  while (run.next < run.starts.length && run.starts[run.next] < at + length) run.next += 1;
  const end = run.starts[run.next];
  if (end === undefined) return ['`'.repeat(length), at + length];
  let code = text.slice(at + length, end).replaceAll('\n', ' ');
  if (code.length > 2 && code.startsWith(' ') && code.endsWith(' ')) code = code.slice(1, -1);
  return [h('code', {}, code), end + length];
}

/** Where runs of backticks begin, by their length; `next`: the first that was not passed. */
function backtickRuns(text) {
  const runs = new Map();
  for (const found of text.matchAll(/`+/g)) {
    const length = found[0].length;
    if (!runs.has(length)) runs.set(length, { starts: [], next: 0 });
    runs.get(length).starts.push(found.index);
  }
  return runs;
}

/** From each `[` to its `]`. */
function bracketEnds(text) {
  const ends = new Map();
  const open = [];
  for (const found of text.matchAll(/\\[^]|[[\]]/g)) {
    if (found[0] === '[') open.push(found.index);
    else if (found[0] === ']' && open.length) ends.set(open.pop(), found.index);
  }
  return ends;
}

/** `[text](url "title")` */
function linkAt(text, at, ends) {
  const end = ends.get(at);
  if (end === undefined || text[end + 1] !== '(') return null;
  const rest = text.slice(end + 2, end + 2 + MOST_URL);
  const found = /^\s?<?((?:[^\s()<>\\]|\([^\s()<>\\]*\))*)>?(?:\s"[^"]*")?\s?\)/.exec(rest);
  if (!found) return null;
  const inner = parse(text.slice(at + 1, end), false);
  return [link(found[1], inner), end + 2 + found[0].length];
}

function bareUrl(text, at) {
  if (at > 0 && /[\w/]/.test(text[at - 1])) return null;
  const found = /^https?:\/\/[^\s<>`"*|\\^{}]+/.exec(text.slice(at, at + MOST_URL));
  if (!found) return null;
  let url = found[0].replace(/[.,;:!?'\]]{1,8}$/, '');
  if (url.endsWith(')') && !url.includes('(')) url = url.slice(0, -1);
  return [link(url, [url]), at + url.length];
}

/** A link that leaves this page alone; what leads elsewhere than it may is text. */
function link(url, nodes) {
  let parsed = null;
  try {
    parsed = new URL(url);
  } catch { /* no absolute address */ }
  if (!parsed || !SCHEMES.has(parsed.protocol)) return h('span', { title: url || null }, ...nodes);
  return h('a', {
    href: parsed.href, target: '_blank', rel: 'noopener noreferrer nofollow', title: parsed.href,
  }, ...nodes);
}

/** A run of signs that may begin or end emphasis; returns where it ends. */
function emphasis(text, at, out) {
  const sign = text[at];
  let end = at;
  while (text[end] === sign) end += 1;
  const before = text[at - 1] ?? ' ';
  const after = text[end] ?? ' ';
  const length = end - at;
  if (length > 3 || (sign === '~' && length !== 2)) {
    put(out, text.slice(at, end));
    return end;
  }
  const inWord = sign === '_' && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
  const opens = !/\s/.test(after) && !inWord && !(isSign(after) && /[\p{L}\p{N}]/u.test(before));
  const closes = !/\s/.test(before) && !inWord;
  let left = length;
  while (left > 0 && closes) {
    const top = out.findLast((one) => one.mark?.[0] === sign && one.mark.length <= left);
    if (!top) break;
    while (out.at(-1) !== top) unwind(out);
    out.pop();
    put(out, h(TAGS[top.mark], {}, ...top.nodes));
    left -= top.mark.length;
  }
  while (left > 0) {
    const mark = sign.repeat(left % 2 ? 1 : 2);
    if (opens && out.length <= MOST_NESTED) {
      out.push({ mark, nodes: [] });
    } else {
      put(out, mark);
    }
    left -= mark.length;
  }
  return end;
}

function isSign(character) {
  return /\p{P}/u.test(character);
}

/** What was opened last is no emphasis: its sign is text. */
function unwind(out) {
  const { mark, nodes } = out.pop();
  for (const node of [mark, ...nodes]) put(out, node);
}
