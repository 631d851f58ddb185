// The page: which views there are, which one is shown, and whether the server is there.

import { getJson, untilHealthy } from './api.js';
import { Chat } from './chat.js';
import { h, icon } from './dom.js';
import { Images } from './images.js';
import { Status } from './status.js';

const THEMES = ['system', 'light', 'dark'];
const THEME = 'piecework-theme';
const STATES_MS = 5000;
const MOST_PAUSE_MS = 30_000;
const element = (id) => document.getElementById(id);
const views = new Map();
let server = { kinds: ['text'], models: [] };

function setUpTheme() {
  const button = element('theme');
  const draw = () => {
    const theme = document.documentElement.dataset.theme ?? 'system';
    const picture = { light: 'sun', dark: 'moon' }[theme] ?? 'system';
    button.replaceChildren(icon(picture));
    button.title = `Theme: ${theme}`;
    button.setAttribute('aria-label', `Theme: ${theme}`);
  };
  button.addEventListener('click', () => {
    const now = document.documentElement.dataset.theme ?? 'system';
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    if (next === 'system') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem(THEME, next);
    } catch { /* kept nowhere, so it is the tab's alone */ }
    draw();
  });
  draw();
}

function setUpNarrow() {
  const button = element('open-sidebar');
  const set = (open) => {
    document.body.classList.toggle('with-sidebar', open);
    button.setAttribute('aria-expanded', String(open));
  };
  button.append(icon('menu'));
  button.addEventListener('click', (event) => {
    event.stopPropagation();
    set(!document.body.classList.contains('with-sidebar'));
  });
  document.addEventListener('narrow-close', () => set(false));
  element('main').addEventListener('click', (event) => {
    if (!event.target.closest('.sidebar')) set(false);
  });
}

function setUpKeys() {
  document.addEventListener('keydown', (event) => {
    const chat = views.get('chat');
    if (!chat || location.hash.slice(1) !== 'chat') return;
    if (document.querySelector('dialog[open]')) return;
    const writes = event.target.closest?.('textarea, input, select');
    if (event.key === 'Escape') {
      document.dispatchEvent(new Event('narrow-close'));
      chat.stop();
    } else if (event.key === '/' && !writes) {
      event.preventDefault();
      chat.input.focus();
    } else if (event.altKey && event.code === 'KeyN') {
      event.preventDefault();
      chat.create();
    }
  });
}

function setUpAway() {
  const banner = element('banner');
  document.addEventListener('away', () => {
    banner.textContent = 'The server is away or starting. Trying again…';
    banner.hidden = false;
    element('state').textContent = 'away';
  });
  document.addEventListener('back', () => {
    banner.hidden = true;
    look();
  });
}

let looking = null;

/**
 * What the server is, and which models it has; while it is away or loads one, once it is there. One
 * look for all who ask.
 */
function look() {
  looking ??= lookUntilThere().finally(() => {
    looking = null;
  });
  return looking;
}

async function lookUntilThere() {
  for (let pause = 0; ; pause = Math.min(2 * pause + 500, MOST_PAUSE_MS)) {
    try {
      const [status, list] = await Promise.allSettled([getJson('v1/status'), getJson('v1/models')]);
      if (status.reason) throw status.reason;
      const { kind, model } = status.value;
      const cards = list.value?.data ?? [];
      take(cards.map((card) => ({ id: card.id, kind: card.status?.kind ?? kind,
        state: card.status?.value ?? null, context: card.max_model_len ?? null,
        images: card.input_modalities?.includes('image') ?? false })), kind);
      const several = cards.some((card) => card.status);
      element('state').textContent = several ? `${cards.length} models` : model;
      if (list.reason) throw list.reason;
      return;
    } catch (error) {
      if (error.status === 401) return;
      await untilHealthy();
      // It may be well, and refuse this for long.
      await new Promise((resume) => setTimeout(resume, pause));
    }
  }
}

/** Show these models, or a server of one of this kind that is not there yet. */
function take(models, kind) {
  const kinds = models.length ? [...new Set(models.map((model) => model.kind))] : [kind];
  const changed = kinds.join() !== server.kinds.join();
  server = { kinds, models };
  for (const view of views.values()) view.setModels?.(models);
  if (changed || !views.size) route();
}

/** Models that come and go are looked at now and then. */
function setUpStates() {
  setInterval(() => {
    if (!document.hidden && server.models.some(({ state }) => state)) look();
  }, STATES_MS);
}

const TITLES = { chat: 'Chat', images: 'Images', status: 'Status' };

const of = (kind) => () => server.models.filter((model) => model.kind === kind);
const MAKERS = {
  chat: () => new Chat(of('text')),
  images: () => new Images(of('images')),
  status: () => new Status(),
};

/** The views of this server. */
function names() {
  const own = [['text', 'chat'], ['images', 'images']];
  return [...own.filter(([kind]) => server.kinds.includes(kind)).map(([, name]) => name), 'status'];
}

/** Show the view that the address names, or the one that is shown, or the first. */
function route() {
  const known = names();
  const asked = [location.hash.slice(1), document.body.dataset.view];
  const name = asked.find((one) => known.includes(one)) ?? known[0];
  if (location.hash.slice(1) !== name) history.replaceState(null, '', `#${name}`);
  if (!views.has(name)) {
    const view = MAKERS[name]();
    views.set(name, view);
    view.setModels?.(server.models);
  }
  for (const [other, view] of views) if (other !== name) view.hide?.();
  element('main').replaceChildren(views.get(name).element);
  views.get(name).appear?.();
  element('tabs').replaceChildren(...known.map((one) => h('a', {
    href: `#${one}`, 'aria-current': one === name ? 'page' : null,
  }, TITLES[one])));
  document.body.dataset.view = name;
  document.title = `${TITLES[name]} · Piecework`;
}

setUpTheme();
setUpNarrow();
setUpKeys();
setUpAway();
setUpStates();
addEventListener('hashchange', route);
await look();
if (!views.size) route();
document.documentElement.dataset.ready = 'true';
