// A line that moves: the last two minutes of one figure, as SVG.

import { h, s } from './dom.js';

const WIDTH = 240;
const HEIGHT = 56;
const MOST = 120;

/** `format(value)` says the figure; `most`: the top of the scale, where it has one. */
export class Chart {
  constructor(label, format, { most = null, tone = 'accent' } = {}) {
    this.format = format;
    this.most = most;
    this.values = [];
    this.figure = h('output', { class: 'figure', 'aria-live': 'off' }, '–');
    this.area = s('path', { class: 'area' });
    this.line = s('path', { class: 'line' });
    this.element = h('div', { class: `chart ${tone}` }, h('span', { class: 'label' }, label),
      this.figure, s('svg', {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', 'aria-hidden': 'true',
      }, this.area, this.line));
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > MOST) this.values.shift();
    const text = value === null ? '–' : this.format(value);
    if (this.figure.textContent !== text) this.figure.textContent = text;
    this.#draw();
  }

  #draw() {
    const known = this.values.filter((value) => value !== null);
    const top = this.most ?? Math.max(1, ...known) * 1.15;
    const step = WIDTH / (MOST - 1);
    const left = WIDTH - (this.values.length - 1) * step;
    const points = this.values.map((value, index) => [left + index * step,
      HEIGHT - 2 - (Math.min(value ?? 0, top) / top) * (HEIGHT - 5)])
      .slice(this.values.findIndex((value) => value !== null));
    const line = `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join('L')}`;
    this.line.setAttribute('d', line);
    this.area.setAttribute('d', `${line}L${WIDTH} ${HEIGHT}L${points[0][0].toFixed(1)} ${HEIGHT}Z`);
  }
}
