// Elements from descriptions. Text is always text: nothing here reads HTML.

const SVG = 'http://www.w3.org/2000/svg';

/** An element: `h('p', {class: 'a', onclick: f, 'aria-label': 'x'}, 'text', child, ...)`. */
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same in SVG. */
export function s(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'value') element.value = value;
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const ICONS = {
  menu: 'M4 6h16M4 12h16M4 18h16',
  plus: 'M12 5v14M5 12h14',
  send: 'M12 19V5M6 11l6-6 6 6',
  stop: 'M7 7h10v10H7z',
  copy: 'M9 9h11v11H9zM5 15H4V4h11v1',
  check: 'M5 12l5 5 9-11',
  edit: 'M4 20h4L19 9l-4-4L4 16zM13 7l4 4',
  again: 'M20 11a8 8 0 1 0-2 6M20 4v7h-7',
  more: 'M5 5l7 7-7 7M13 5l7 7-7 7',
  trash: 'M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13',
  left: 'M14 6l-6 6 6 6',
  right: 'M10 6l6 6-6 6',
  sliders: 'M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4',
  down: 'M12 5v14M6 13l6 6 6-6',
  save: 'M12 4v11M7 11l5 5 5-5M5 20h14',
  open: 'M12 16V4M7 8l5-5 5 5M5 20h14',
  clip: 'M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.7 4.7L9.5 17',
  text: 'M6 3h9l4 4v14H6zM9 12h7M9 16h7',
  close: 'M6 6l12 12M18 6L6 18',
  sun: 'M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2'
    + 'M19 5l-2 2M7 17l-2 2',
  moon: 'M20 14A8 8 0 0 1 10 4a8 8 0 1 0 10 10z',
  system: 'M3 5h18v12H3zM8 21h8M12 17v4',
};

export function icon(name) {
  return s('svg', { viewBox: '0 0 24 24', class: 'icon', 'aria-hidden': 'true' },
    s('path', { d: ICONS[name] }));
}

/** A button that shows an icon and is called `label`. */
export function iconButton(name, label, onclick, properties = {}) {
  return h('button', {
    type: 'button', class: 'icon-button', title: label, 'aria-label': label, onclick, ...properties,
  }, icon(name));
}

/** Put text on the clipboard, also where the page came without TLS and has no clipboard API. */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { /* not allowed: the old way */ }
  }
  const area = h('textarea', { class: 'unseen', value: text });
  document.body.append(area);
  area.select();
  const copied = document.execCommand('copy');
  area.remove();
  return copied;
}

/** A button that copies what `text()` gives and says that it did. */
export function copyButton(text, label = 'Copy') {
  const button = iconButton('copy', label, async () => {
    const copied = await copyText(text());
    button.replaceChildren(icon(copied ? 'check' : 'close'));
    announce(copied ? 'Copied' : 'Copying is not allowed here');
    setTimeout(() => button.replaceChildren(icon('copy')), 1500);
  });
  return button;
}

/** Hand the browser a file to save. */
export function saveFile(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = h('a', { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

const MOST_ANNOUNCED = 12;

/** Say something to a screen reader, after what it says now. */
export function announce(text) {
  const log = document.getElementById('announcer');
  log.append(h('p', {}, text));
  while (log.childElementCount > MOST_ANNOUNCED) log.firstElementChild.remove();
}

/** An id that is not guessed or drawn twice; `randomUUID` is missing where the page has no TLS. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

export function formatNumber(value, digits = 0) {
  return Number(value).toLocaleString('en', { maximumFractionDigits: digits });
}
