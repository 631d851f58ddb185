// A text in Markdown that grows, as DOM nodes: what is finished is drawn once and stays, only its
// last blocks are drawn again; open code grows by what is new.

import { isClosing, parseBlocks } from './blocks.js';
import { colour } from './colours.js';
import { copyButton, h } from './dom.js';
import { inlineNodes } from './inline.js';

const LINES_A_CHUNK = 100;

/**
 * Draws into `element`. `update(text)` with all of the text so far, which only grows; `finish()`
 * once it is whole. `onblock(text)` hears each block's text when it is finished.
 */
export class MarkdownView {
  constructor(element, onblock = null) {
    this.element = element;
    this.onblock = onblock;
    this.stable = 0;
    this.live = [];
    this.code = null;
    this.text = '';
  }

  update(text) {
    this.text = text;
    if (this.code && !this.#growCode()) return;
    this.#draw(false);
  }

  finish() {
    if (this.code) {
      this.stable = this.code.start;
      this.code = null;
    }
    this.#draw(true);
  }

  /** Draw from the first block that may still change. */
  #draw(isWhole) {
    const rest = this.text.slice(this.stable);
    const blocks = parseBlocks(rest);
    const kept = isWhole ? blocks.length : countStable(blocks, rest);
    for (const node of this.live) node.remove();
    this.live = [];
    const from = this.stable;
    blocks.forEach((block, index) => {
      const node = blockNode(block);
      this.element.append(node);
      if (index >= kept) this.live.push(node);
      else this.onblock?.(block.kind === 'code' ? 'Code.' : node.textContent);
    });
    const last = blocks.at(-1);
    this.stable = from + (kept < blocks.length ? blocks[kept].start : kept ? rest.length : 0);
    if (!isWhole && last?.kind === 'code' && !last.closed && this.live.length === 1) {
      this.#openCode(last, from + last.start);
    }
  }

  #openCode(block, start) {
    const begin = this.text.indexOf('\n', start) + 1;
    if (begin === 0) return;
    const view = new CodeView(block.language);
    this.live[0].replaceWith(view.element);
    this.live = [view.element];
    this.code = { view, start, at: begin, fence: block.fence, indent: block.indent };
    this.#growCode();
  }

  /** Whether the code has ended, and what follows is to be drawn. */
  #growCode() {
    const code = this.code;
    const lines = [];
    for (let end; (end = this.text.indexOf('\n', code.at)) >= 0; code.at = end + 1) {
      const line = this.text.slice(code.at, end);
      if (isClosing(line, code.fence)) {
        code.view.add(lines);
        code.view.end();
        this.onblock?.('Code.');
        this.stable = end + 1;
        this.live = [];
        this.code = null;
        return true;
      }
      lines.push(unindented(line, code.indent));
    }
    code.view.add(lines);
    const tail = this.text.slice(code.at);
    code.view.tail(/^\s*[`~]*$/.test(tail.slice(0, 200)) ? '' : unindented(tail, code.indent));
    return false;
  }
}

/** Draw a whole text. */
export function drawMarkdown(element, text) {
  element.replaceChildren(...parseBlocks(text).map(blockNode));
}

/** How many of the blocks stay as they are, whatever follows: all but the last, and the one before
 * it while the last one's first line may still become something else. */
function countStable(blocks, text) {
  if (blocks.length < 2) return 0;
  const last = blocks.at(-1).start;
  return text.indexOf('\n', last) < 0 ? blocks.length - 2 : blocks.length - 1;
}

function unindented(line, indent) {
  let at = 0;
  while (at < indent && line[at] === ' ') at += 1;
  return line.slice(at);
}

function blockNode(block) {
  switch (block.kind) {
    case 'heading':
      // The page has the first two levels itself.
      return h(`h${Math.min(block.level + 2, 6)}`, {}, ...inlineNodes(block.text));
    case 'rule': return h('hr');
    case 'quote': return h('blockquote', {}, ...block.blocks.map(blockNode));
    case 'code': return codeNode(block);
    case 'list': return listNode(block);
    case 'table': return tableNode(block);
    default: return h('p', {}, ...inlineNodes(block.text));
  }
}

function codeNode(block) {
  const view = new CodeView(block.language);
  const lines = block.text.split('\n');
  if (!block.closed) view.tail(lines.pop());
  view.add(lines);
  if (block.closed) view.colour();
  return view.element;
}

function listNode(list) {
  const start = list.ordered && list.first !== 1 ? list.first : null;
  return h(list.ordered ? 'ol' : 'ul', { start }, ...list.items.map((blocks) => {
    const first = blocks[0];
    let done = null;
    if (first?.kind === 'paragraph' && /^\[[ xX]\] /.test(first.text)) {
      done = first.text[1] !== ' ';
      first.text = first.text.slice(4);
    }
    const nodes = blocks.flatMap((block) => (block.kind === 'paragraph' && !list.loose
      ? inlineNodes(block.text) : [blockNode(block)]));
    if (done !== null) {
      nodes.unshift(h('input', {
        type: 'checkbox', disabled: true, checked: done, 'aria-label': done ? 'done' : 'to do',
      }));
    }
    return h('li', { class: done === null ? null : 'task' }, ...nodes);
  }));
}

function tableNode({ align, head, rows }) {
  const cell = (tag) => (text, column) => h(
    tag, { class: align[column] ? `to-${align[column]}` : null }, ...inlineNodes(text));
  return h('div', { class: 'table', tabindex: '0', role: 'group', 'aria-label': 'Table' },
    h('table', {}, h('thead', {}, h('tr', {}, ...head.map(cell('th')))),
      h('tbody', {}, ...rows.map((row) => h('tr', {}, ...row.map(cell('td')))))));
}

/** Code with its language and a button that copies it. Its lines are drawn in chunks, so that a new
 * one does not lay out thousands again. */
class CodeView {
  constructor(language) {
    this.lines = [];
    this.last = document.createTextNode('');
    this.code = h('code', {}, this.last);
    this.chunk = null;
    this.language = language;
    const name = language.slice(0, 40);
    this.element = h('div', { class: 'code' },
      h('div', { class: 'code-head' }, h('span', {}, name || 'text'),
        copyButton(() => this.#text(), 'Copy code')),
      h('pre', { tabindex: '0', 'aria-label': name ? `Code, ${name}` : 'Code' }, this.code));
  }

  add(lines) {
    for (let at = 0; at < lines.length;) {
      if (this.lines.length % LINES_A_CHUNK === 0) {
        this.chunk = document.createTextNode('');
        this.code.insertBefore(h('span', { class: 'chunk' }, this.chunk), this.last);
      }
      const room = LINES_A_CHUNK - (this.lines.length % LINES_A_CHUNK);
      const part = lines.slice(at, at + room);
      this.chunk.appendData(part.map((line) => `${line}\n`).join(''));
      this.lines.push(...part);
      at += part.length;
    }
  }

  tail(text) {
    if (this.last.data !== text) this.last.data = text;
  }

  end() {
    this.tail('');
    this.colour();
  }

  /** The code is whole: give it colours. */
  colour() {
    colour(this.lines.map((line) => `${line}\n`).join(''), this.language, LINES_A_CHUNK,
      (chunks) => this.code.replaceChildren(...chunks, this.last));
  }

  #text() {
    return [...this.lines, this.last.data].join('\n').replace(/\n$/, '');
  }
}
