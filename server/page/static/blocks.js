// Markdown's blocks: text to a list of what it holds, line by line, in time linear in its length.
// What models write of CommonMark (https://spec.commonmark.org) and of GitHub's tables
// (https://github.github.com/gfm). HTML is text.

const MOST_DEPTH = 8;
const MOST_COLUMNS = 64;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*)|)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: {1,4}(.*)|)$/;
const FORMULA = /^ {0,3}(\\\[|\$\$)/;
const CELL = /^:?-+:?$/;

/**
 * The blocks of a text, each with `start`, its first character. Kinds: `heading` (level, text),
 * `code` (language, text, closed), `rule`, `quote` (blocks), `list` (ordered, first, items, loose),
 * `table` (align, head, rows), `paragraph` (text).
 */
export function parseBlocks(text, depth = 0) {
  const lines = text.split('\n');
  const starts = [0];
  for (const line of lines) starts.push(starts.at(-1) + line.length + 1);
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    block.start = starts[at];
    blocks.push(block);
    at = next;
  }
  return blocks;
}

/** The fence that a line closes code with: at least as long, and of the same sign. */
export function isClosing(line, fence) {
  const found = line.trim();
  return found.length >= fence.length && found === fence[0].repeat(found.length)
    && indentOf(line) < 4;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  let found = FENCE.exec(line);
  if (found) return codeAt(lines, at, found);
  found = HEADING.exec(line);
  if (found) {
    return [{ kind: 'heading', level: found[1].length, text: headingText(found[2]) }, at + 1];
  }
  if (RULE.test(line)) return [{ kind: 'rule' }, at + 1];
  if (depth < MOST_DEPTH) {
    if (QUOTE.test(line)) return quoteAt(lines, at, depth);
    if (ITEM.test(line)) return listAt(lines, at, depth);
  }
  if (FORMULA.test(line)) return formulaAt(lines, at);
  return tableAt(lines, at) ?? paragraphAt(lines, at, depth);
}

function codeAt(lines, at, [, fence, info]) {
  const indent = indentOf(lines[at]);
  let end = at + 1;
  while (end < lines.length && !isClosing(lines[end], fence)) end += 1;
  const text = lines.slice(at + 1, end).map((line) => without(line, indent)).join('\n');
  const closed = end < lines.length;
  return [{ kind: 'code', language: info.trim().split(/\s/)[0], text, fence, indent, closed },
    Math.min(end + 1, lines.length)];
}

function quoteAt(lines, at, depth) {
  const inner = [];
  let end = at;
  for (let found; end < lines.length && (found = QUOTE.exec(lines[end])); end += 1) {
    inner.push(found[1]);
  }
  return [{ kind: 'quote', blocks: parseBlocks(inner.join('\n'), depth + 1) }, end];
}

function listAt(lines, at, depth) {
  const [, space, mark] = ITEM.exec(lines[at]);
  const base = space.length;
  const ordered = /\d/.test(mark);
  const items = [];
  let loose = false;
  let blank = false;
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (isBlank(line)) {
      blank = true;
      continue;
    }
    const found = ITEM.exec(line);
    const indent = indentOf(line);
    if (found && indent < base + 2 && !RULE.test(line)) {
      if (/\d/.test(found[2]) !== ordered || indent < base - 1) break;
      loose ||= blank && items.length > 0;
      items.push({ width: indent + found[2].length + 1, lines: [found[3] ?? ''] });
    } else if (indent >= base + 2) {
      const item = items.at(-1);
      if (blank) item.lines.push('');
      item.lines.push(without(line, item.width));
    } else if (!blank && !beginsBlock(line)) {
      items.at(-1).lines.push(line.trimStart());
    } else {
      break;
    }
    blank = false;
  }
  return [{
    kind: 'list', ordered, first: ordered ? Number.parseInt(mark, 10) : null, loose,
    items: items.map((item) => parseBlocks(item.lines.join('\n'), depth + 1)),
  }, end];
}

function tableAt(lines, at) {
  if (!lines[at].includes('|') || at + 1 >= lines.length) return null;
  const marks = cellsOf(lines[at + 1]);
  if (!lines[at + 1].includes('-') || marks.length > MOST_COLUMNS) return null;
  if (!marks.every((mark) => CELL.test(mark))) return null;
  const head = cellsOf(lines[at]);
  if (head.length !== marks.length) return null;
  let end = at + 2;
  const rows = [];
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines[end])) {
    const cells = cellsOf(lines[end]).slice(0, head.length);
    while (cells.length < head.length) cells.push('');
    rows.push(cells);
    end += 1;
  }
  const align = marks.map((mark) => {
    if (!mark.endsWith(':')) return null;
    return mark.startsWith(':') ? 'center' : 'right';
  });
  return [{ kind: 'table', align, head, rows }, end];
}

/** A paragraph with a formula, up to its end or an empty line: no line of it begins a list. */
function formulaAt(lines, at) {
  const [open, sign] = FORMULA.exec(lines[at]);
  const close = sign === '$$' ? '$$' : '\\]';
  let end = at;
  for (let from = open.length; end < lines.length && !isBlank(lines[end]); from = 0, end += 1) {
    if (lines[end].includes(close, from)) {
      end += 1;
      break;
    }
  }
  return [{ kind: 'paragraph', text: lines.slice(at, end).join('\n').trim() }, end];
}

function paragraphAt(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end])
    && !(depth < MOST_DEPTH && beginsBlock(lines[end])) && !tableAt(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join('\n').trimEnd();
  return [{ kind: 'paragraph', text }, end];
}

/** Whether a line ends a paragraph before it. Numbers do so with 1 alone, as CommonMark has it. */
function beginsBlock(line) {
  const item = ITEM.exec(line);
  const lists = item && item[3] && (!/\d/.test(item[2]) || Number.parseInt(item[2], 10) === 1);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || FORMULA.test(line) || lists;
}

function cellsOf(line) {
  const cells = [''];
  const row = line.trim();
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === '\\' && row[at + 1] === '|') {
      cells[cells.length - 1] += '|';
      at += 1;
    } else if (row[at] === '|') {
      cells.push('');
    } else {
      cells[cells.length - 1] += row[at];
    }
  }
  if (row.startsWith('|')) cells.shift();
  if (cells.length > 1 && cells.at(-1).trim() === '') cells.pop();
  return cells.map((cell) => cell.trim());
}

/** A heading's text without the signs that may close it. */
function headingText(text = '') {
  const whole = text.trimEnd();
  let end = whole.length;
  while (end > 0 && whole[end - 1] === '#') end -= 1;
  return (end === 0 || whole[end - 1] === ' ' ? whole.slice(0, end) : whole).trim();
}

function isBlank(line) {
  return line.trim() === '';
}

function indentOf(line) {
  let at = 0;
  while (line[at] === ' ' || line[at] === '\t') at += 1;
  return at;
}

/** A line without up to `width` spaces that it begins with. */
function without(line, width) {
  return line.slice(Math.min(indentOf(line), width));
}
