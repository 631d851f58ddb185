// Formulas in TeX, drawn by KaTeX, which is loaded with the first one.

import { h } from './dom.js';

const MOST_KEPT = 500;
const drawn = new Map();
let loading = null;
let katex = null;

/** Load KaTeX; resolves to whether it is there. */
export function loadFormulas() {
  loading ??= import('./katex.min.js').then(() => {
    document.head.append(h('link', { rel: 'stylesheet', href: 'page/katex.min.css' }));
    katex = globalThis.katex;
    return true;
  }).catch(() => {
    loading = null;
    return false;
  });
  return loading;
}

/** A formula; until it is drawn, and where it cannot be, its `source` with the marks around it. */
export function formula(tex, source, display) {
  const element = h('span', { class: display ? 'formula display' : 'formula' }, source);
  if (katex) {
    draw(element, tex, source, display);
  } else {
    loadFormulas().then((loaded) => loaded && draw(element, tex, source, display));
  }
  return element;
}

function draw(element, tex, source, display) {
  let node = drawn.get(source);
  if (!node) {
    node = h('span');
    try {
      katex.render(tex, node, { displayMode: display, throwOnError: true, strict: 'ignore',
        trust: false, maxSize: 20, maxExpand: 500 });
    } catch {
      node.replaceChildren(source);
    }
    if (drawn.size >= MOST_KEPT) drawn.clear();
    drawn.set(source, node);
  }
  element.replaceChildren(...node.cloneNode(true).childNodes);
}
