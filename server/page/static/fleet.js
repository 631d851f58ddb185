// The models of a server of several: where each stands, and loading and unloading.

import { getJson } from './api.js';
import { announce, formatNumber, h } from './dom.js';

const MIB = 2 ** 20;
const NAMES = ['Model', 'State', 'Running', 'Waiting', 'Memory', 'Do'];
const LOADED = ['ready', 'loading', 'queued'];

/** `onchoose()`: the figures of `chosen` are to be shown. */
export class ModelTable {
  constructor(onchoose) {
    this.onchoose = onchoose;
    this.chosen = null;
    this.cards = [];
    this.rows = h('tbody');
    this.problem = h('p', { class: 'problem', role: 'alert' });
    this.element = h('section', { hidden: true }, h('h2', {}, 'Models'), this.problem,
      h('div', { class: 'table', tabindex: '0', role: 'group', 'aria-label': 'Models' },
        h('table', {}, h('thead', {}, h('tr', {}, ...NAMES.map(
          (name) => h('th', { scope: 'col' }, name)))), this.rows)));
  }

  /** Draw the cards of `/v1/models`. The focus stays where it is. */
  draw(cards) {
    this.element.hidden = false;
    this.cards = cards;
    const shown = cards.map(
      ({ id, status }) => ({ id, status: { ...status, idle_seconds: null } }));
    const told = JSON.stringify([shown, this.chosen]);
    if (told === this.told) return;
    this.told = told;
    const focused = document.activeElement?.getAttribute('data-key');
    this.rows.replaceChildren(...shown.map((card) => this.#row(card)));
    const buttons = [...this.rows.querySelectorAll('button')];
    if (focused) buttons.find((one) => one.dataset.key === focused)?.focus();
  }

  /** Why there are no figures of the chosen one. */
  reason() {
    const { status } = this.cards.find(({ id }) => id === this.chosen) ?? {};
    return status?.failure ? `${this.chosen} has failed: ${status.failure}`
      : `${this.chosen} has not been loaded.`;
  }

  #row({ id, status }) {
    const does = LOADED.includes(status.value) ? 'unload' : 'load';
    const label = does === 'load' ? 'Load' : 'Unload';
    const show = h('button', {
      type: 'button', class: 'quiet name', 'data-key': `show ${id}`, title: id,
      'aria-pressed': String(id === this.chosen),
      onclick: () => {
        this.chosen = id;
        this.onchoose();
      },
    }, id);
    const button = h('button', {
      type: 'button', 'data-key': `load ${id}`, 'aria-label': `${label} ${id}`,
      disabled: status.value === 'unloading', onclick: () => this.#ask(does, id),
    }, label);
    const memory = formatNumber((status.memory || status.memory_needed) / MIB);
    return h('tr', {}, h('td', {}, show),
      h('td', { title: status.failure },
        h('span', { class: `phase ${status.value}` }, status.value)),
      h('td', {}, formatNumber(status.requests)), h('td', {}, formatNumber(status.waiting)),
      h('td', {}, `${memory} MiB`), h('td', {}, button));
  }

  async #ask(does, model) {
    this.problem.textContent = '';
    announce(`${does} ${model}`);
    try {
      await getJson(`v1/models/${does}`, { body: { model } });
    } catch (error) {
      this.problem.textContent = error.message;
    }
  }
}
