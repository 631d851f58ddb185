// One message as it is shown: text, thought, calls, figures, and what can be done with it.

import { speedOf } from './answer.js';
import { thumbnail } from './attach.js';
import { announce, copyButton, h, icon, iconButton } from './dom.js';
import { MarkdownView } from './markdown.js';

const NAMES = { user: 'You', assistant: 'Answer', tool: 'Tool result', system: 'System' };
/** Of the time that drawing takes, how much of the time it may take. */
const LEAST_SHARE = 4;
const CUT = new Set(['stopped', 'broken', 'failed']);
const ENDS = {
  length: 'It ended at its longest: raise the limit, or go on.',
  abort: 'The server ended it.',
};

/**
 * The view of a node. `actions`: `edit(node, text)`, which returns whether it was sent,
 * `again(node)`, `goOn(node)`, `choose(node, step)`, `answerCalls(node, results)`.
 * Of an edited answer `edit` sends nothing.
 * `siblings(node)`: of the tree; `isLast(node)`: nothing follows it.
 */
export class MessageView {
  constructor(node, { actions, siblings, isLast }) {
    this.node = node;
    this.actions = actions;
    this.siblings = siblings;
    this.isLast = isLast;
    this.body = h('div', { class: `body ${node.role === 'assistant' ? 'prose' : 'plain'}` });
    this.extras = h('div', { class: 'extras' });
    this.foot = h('div', { class: 'foot' });
    this.thought = null;
    this.element = h('article', {
      class: `message ${node.role}`, 'data-id': node.id, 'aria-label': NAMES[node.role],
    }, this.body, this.extras, this.foot);
    this.drawn = null;
    this.length = 0;
    this.due = 0;
    if (node.role !== 'assistant') {
      this.body.append(node.text);
      this.extras.append(...(node.files ?? []).map((file) => (file.image ? thumbnail(file)
        : h('details', { class: 'call' }, h('summary', {}, file.name),
          h('pre', { tabindex: '0' }, file.text)))));
      this.body.hidden = !node.text;
    }
    this.refresh();
  }

  /** Draw what is new, soon: never faster than the screen, and seldom where drawing takes long. */
  refresh() {
    if (this.node.role !== 'assistant' || this.node.state !== 'running') {
      this.#draw();
      return;
    }
    if (this.due) return;
    this.due = requestAnimationFrame(() => {
      const began = performance.now();
      this.#draw();
      const spent = performance.now() - began;
      this.due = setTimeout(() => {
        this.due = 0;
        if (this.length !== this.node.text.length + this.node.thought.length) this.refresh();
      }, spent * LEAST_SHARE);
    });
  }

  #draw() {
    const { node } = this;
    if (node.role === 'assistant') this.#drawAnswer();
    this.#drawFoot();
    this.element.classList.toggle('running', node.state === 'running');
    this.element.dispatchEvent(new CustomEvent('drawn', { bubbles: true }));
  }

  #drawAnswer() {
    const { node } = this;
    const speaks = node.state === 'running';
    if (node.thought) this.#drawThought();
    if (!this.drawn || node.text.length < this.drawn.text.length) {
      this.body.replaceChildren();
      this.drawn = new MarkdownView(this.body, speaks ? announce : null);
    }
    this.drawn.update(node.text);
    if (node.state !== 'running') this.drawn.finish();
    this.length = node.text.length + node.thought.length;
    this.#drawExtras();
  }

  /** Folded; what is new is added. */
  #drawThought() {
    if (!this.thought) {
      const text = document.createTextNode('');
      const title = h('summary');
      this.thought = { text, title };
      this.element.insertBefore(h('details', { class: 'thought' }, title,
        h('div', { class: 'plain' }, text)), this.body);
    }
    const { text, title } = this.thought;
    if (this.node.thought.startsWith(text.data)) {
      text.appendData(this.node.thought.slice(text.length));
    } else {
      text.data = this.node.thought;
    }
    const thinks = this.node.state === 'running' && !this.node.text;
    const label = thinks ? 'Thinking…' : 'Thought';
    if (title.textContent !== label) title.textContent = label;
  }

  #drawExtras() {
    const { node } = this;
    const kept = new Set([...this.extras.querySelectorAll('details[open]')].map(
      (one) => one.dataset.key));
    const parts = node.calls.map((call, index) => h('details', {
      class: 'call', 'data-key': `call-${index}`, open: kept.has(`call-${index}`),
    }, h('summary', {}, 'Calls ', h('code', {}, call.name || '…')),
    h('pre', { tabindex: '0' }, readable(call.arguments))));
    if (node.calls.length && node.state === 'done' && this.isLast(node)) {
      parts.push(this.#resultForm());
    }
    if (node.waits) {
      const note = 'The server is away. The answer goes on when it is back.';
      parts.push(h('p', { class: 'note' }, note));
    }
    if (node.state === 'running' && !node.text && !node.thought && !node.waits) {
      parts.push(h('span', { class: 'dots', 'aria-hidden': 'true' }, h('i'), h('i'), h('i')));
    }
    if (node.state === 'failed') parts.push(this.#error());
    if (node.state === 'broken') {
      parts.push(h('p', { class: 'note' }, 'This answer was interrupted.'));
    }
    if (ENDS[node.reason] && node.state === 'done') {
      parts.push(h('p', { class: 'note' }, ENDS[node.reason]));
    }
    if (parts.length || this.extras.childElementCount) this.extras.replaceChildren(...parts);
  }

  #error() {
    const { error } = this.node;
    return h('div', { class: 'error', role: 'alert' },
      h('p', {}, error.message),
      h('button', { type: 'button', onclick: () => this.actions.again(this.node) }, 'Try again'));
  }

  /** What the called functions gave is the user's to say: a page can run none. */
  #resultForm() {
    if (this.results) return this.results;
    const areas = this.node.calls.map((call) => h('textarea', {
      rows: '2', 'aria-label': `Result of ${call.name}`, placeholder: `Result of ${call.name}`,
    }));
    this.results = h('div', { class: 'results' }, ...areas, h('button', {
      type: 'button',
      onclick: () => this.actions.answerCalls(this.node, areas.map((area) => area.value)),
    }, 'Send results'));
    return this.results;
  }

  #drawFoot() {
    const { node } = this;
    const { ids, index } = this.siblings(node);
    if (node.state === 'running') {
      this.foot.replaceChildren();
      this.key = 'running';
      return;
    }
    const key = [node.state, ids.length, index, speedOf(node)].join();
    if (key === this.key) return;
    this.key = key;
    const parts = [];
    if (ids.length > 1) {
      parts.push(h('span', { class: 'branches', role: 'group', 'aria-label': 'Branches' },
        iconButton('left', 'Previous branch', () => this.actions.choose(node, -1),
          { disabled: index === 0 }),
        h('span', {}, `${index + 1} / ${ids.length}`),
        iconButton('right', 'Next branch', () => this.actions.choose(node, 1),
          { disabled: index === ids.length - 1 })));
    }
    parts.push(copyButton(() => node.text, 'Copy message'));
    if (node.role !== 'tool') parts.push(iconButton('edit', 'Edit', () => this.edit()));
    if (node.role === 'assistant') {
      parts.push(iconButton('again', 'Answer again', () => this.actions.again(node)));
      if (CUT.has(node.state) || ENDS[node.reason]) {
        parts.push(iconButton('more', 'Go on', () => this.actions.goOn(node)));
      }
      parts.push(h('span', { class: 'figures' }, speedOf(node)));
    }
    this.foot.replaceChildren(...parts);
  }

  /** The message becomes a field; what is sent is a branch beside it. */
  edit() {
    const asks = this.node.role === 'user';
    const area = h('textarea', { class: 'edit', 'aria-label': 'Edit the message',
      value: this.node.text,
      rows: Math.min(asks ? 12 : 24, this.node.text.split('\n').length + 1) });
    const close = () => {
      form.remove();
      this.body.hidden = asks && !this.node.text;
      this.foot.hidden = false;
    };
    const send = () => {
      if (area.value.trim() && !this.actions.edit(this.node, area.value)) return;
      close();
    };
    area.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        close();
      } else if (event.key === 'Enter' && !event.isComposing
        && (asks ? !event.shiftKey : event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        send();
      }
    });
    const form = h('div', { class: 'editing' }, area, h('div', { class: 'row end' },
      h('button', { type: 'button', onclick: close }, 'Cancel'),
      h('button', { type: 'button', class: 'primary', onclick: send },
        icon(asks ? 'send' : 'check'), asks ? 'Send' : 'Save')));
    this.body.hidden = true;
    this.foot.hidden = true;
    this.element.append(form);
    area.focus();
  }
}

/** Arguments of a call, indented where they are JSON. */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
