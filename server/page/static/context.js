// How much of a model's context a conversation takes.

import { formatNumber, h } from './dom.js';

/** A meter; hidden until both figures are known. */
export class ContextMeter {
  constructor() {
    this.element = h('span', { class: 'context', hidden: true });
  }

  /** `nodes`: those that are shown; `length`: of the model's context. */
  draw(nodes, length) {
    const usage = nodes.findLast((node) => node.usage)?.usage;
    this.element.hidden = !usage || !length;
    if (this.element.hidden) return;
    const used = usage.prompt_tokens + (usage.completion_tokens ?? 0);
    const told = `${formatNumber(used)} of ${formatNumber(length)} tokens`;
    this.element.title = `Context: ${told}`;
    this.element.replaceChildren(h('meter', { min: '0', max: length, high: length * 0.9,
      value: used, 'aria-label': 'Context in use' }), told);
  }
}
