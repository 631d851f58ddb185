// The list of conversations: open, find, rename, delete, save and load.

import { announce, h, iconButton, icon, saveFile } from './dom.js';
import { exported, importFile, markdownOf } from './portable.js';
import { conversationsWith, get, isKept, last, put, removeConversation } from './store.js';

const A_PAGE = 60;
const TYPED_MS = 150;
const MOST_EXPORTED = 10_000;

/** `actions`: `open(id)`, `create()`, `changed({removed})` or `changed({renamed, title})`. */
export class Sidebar {
  constructor(actions) {
    this.actions = actions;
    this.count = A_PAGE;
    this.current = null;
    this.list = h('ul', { class: 'conversations' });
    this.search = h('input', {
      type: 'search', placeholder: 'Find', 'aria-label': 'Find a conversation',
      oninput: () => {
        clearTimeout(this.typed);
        this.typed = setTimeout(() => this.refresh(), TYPED_MS);
      },
    });
    this.more = h('button', { type: 'button', class: 'quiet', hidden: true, onclick: () => {
      this.count += A_PAGE;
      this.refresh();
    } }, 'Show more');
    this.note = h('p', { class: 'note' });
    const file = h('input', { type: 'file', accept: '.json,application/json', hidden: true,
      'aria-label': 'File with conversations', onchange: () => this.#load(file) });
    this.element = h('aside', { class: 'sidebar', id: 'sidebar', 'aria-label': 'Conversations' },
      h('button', { type: 'button', class: 'new', onclick: () => actions.create() },
        icon('plus'), 'New conversation'),
      this.search, h('div', { class: 'scroll' }, this.list, this.more), this.note,
      h('div', { class: 'row' },
        h('button', { type: 'button', class: 'quiet', onclick: () => this.#saveAll() },
          icon('save'), 'Export'),
        h('button', { type: 'button', class: 'quiet', onclick: () => file.click() },
          icon('open'), 'Import'), file));
    this.refresh();
  }

  /** Show what is kept now. */
  async refresh() {
    const sought = this.search.value.trim().toLowerCase();
    const turn = this.turn = Symbol('turn');
    const ids = sought ? await conversationsWith(sought) : new Set();
    if (this.turn !== turn) return;
    const found = await last('conversations', this.count + 1,
      (info) => ids.has(info.id) || info.title.toLowerCase().includes(sought));
    if (this.turn !== turn) return;
    this.more.hidden = found.length <= this.count;
    const rows = found.slice(0, this.count).map((info) => this.#row(info));
    this.list.replaceChildren(...rows);
    if (!isKept) this.note.textContent = 'Nothing is kept here: conversations end with the tab.';
  }

  /** Whether the list shows it. */
  has(id) {
    return [...this.list.children].some((row) => row.dataset.id === id);
  }

  show(id) {
    this.current = id;
    for (const row of this.list.children) this.#mark(row);
  }

  #mark(row) {
    const button = row.querySelector('.open');
    if (row.dataset.id === this.current) button?.setAttribute('aria-current', 'true');
    else button?.removeAttribute('aria-current');
  }

  #row(info) {
    const row = h('li', { 'data-id': info.id },
      h('button', { type: 'button', class: 'open', title: info.title,
        onclick: () => this.actions.open(info.id) }, h('bdi', {}, info.title)),
      iconButton('edit', `Rename ${info.title}`, () => this.#rename(row, info)),
      iconButton('save', `Export ${info.title}`, () => this.#save([info.id], info.title)),
      iconButton('text', `Export ${info.title} as Markdown`, () => this.#saveText(info)),
      iconButton('trash', `Delete ${info.title}`, () => this.#remove(row, info)));
    this.#mark(row);
    return row;
  }

  #rename(row, info) {
    const end = async (keeps) => {
      const title = input.value.trim().slice(0, 200);
      if (keeps && title && title !== info.title) {
        const known = await get('conversations', info.id);
        if (known) {
          known.title = title;
          await put('conversations', known);
          this.actions.changed({ renamed: known.id, title });
        }
      }
      this.refresh();
    };
    const input = h('input', { type: 'text', value: info.title, maxlength: '200',
      'aria-label': 'New title' });
    input.addEventListener('keydown', (event) => {
      if (event.key === 'Enter') input.blur();
      if (event.key === 'Escape') {
        input.value = info.title;
        input.blur();
        event.stopPropagation();
      }
    });
    input.addEventListener('blur', () => end(true), { once: true });
    row.replaceChildren(input);
    input.select();
  }

  /** Asks in the row itself. */
  #remove(row, info) {
    const sure = h('button', { type: 'button', class: 'danger', onclick: async () => {
      await removeConversation(info.id);
      this.actions.changed({ removed: info.id });
      announce('Deleted');
      this.refresh();
    } }, 'Delete');
    row.replaceChildren(h('span', { class: 'ask' }, 'Delete it?'), sure,
      h('button', { type: 'button', onclick: () => this.refresh() }, 'Keep'));
    sure.focus();
  }

  async #save(ids, title) {
    saveFile(`${fileName(title)}.json`, await exported(ids));
  }

  async #saveText({ id, title }) {
    saveFile(`${fileName(title)}.md`, await markdownOf(id));
  }

  async #saveAll() {
    const infos = await last('conversations', MOST_EXPORTED);
    await this.#save(infos.map((info) => info.id), 'conversations');
  }

  async #load(input) {
    const [file] = input.files;
    input.value = '';
    if (!file) return;
    try {
      const count = await importFile(file);
      this.note.textContent = `Imported: ${count}`;
    } catch (error) {
      this.note.textContent = error.message;
    }
    announce(this.note.textContent);
    this.refresh();
  }
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 60) || 'conversation';
}
