// The view of figures: what the server does now, a request a row, its graphs, what went wrong.

import { getJson, untilHealthy } from './api.js';
import { Chart } from './charts.js';
import { formatNumber, h } from './dom.js';
import { ModelTable } from './fleet.js';
import { graphMap } from './graphmap.js';

const EVERY_MS = 1000;
const MIB = 2 ** 20;
const whole = (value) => formatNumber(value);
const percent = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;

export class Status {
  constructor() {
    this.timer = 0;
    this.before = null;
    this.charts = null;
    this.lead = h('p', { class: 'lead', role: 'status' });
    this.grid = h('div', { class: 'charts' });
    this.requests = h('tbody');
    this.count = h('p', { class: 'note' });
    this.table = h('section', {}, h('h2', {}, 'Requests'), this.count,
      h('div', { class: 'table', tabindex: '0', role: 'group', 'aria-label': 'Requests' },
        h('table', {}, h('thead', {}, h('tr', {}, ...['Request', 'Phase', 'Seconds', 'Prompt',
          'Cached', 'Answer'].map((name) => h('th', { scope: 'col' }, name)))), this.requests)));
    this.graphs = h('section', { class: 'graphs' });
    this.facts = h('section', {});
    this.isFleet = false;
    this.models = new ModelTable(() => this.#choose());
    this.figures = h('div', {}, this.lead, this.grid, this.table, this.graphs, this.facts);
    this.element = h('div', { class: 'status' }, h('div', { class: 'page' },
      h('h1', {}, 'Status'), this.models.element, this.figures));
    document.addEventListener('visibilitychange', () => this.#schedule());
  }

  /** Several models have a table of their own, and figures of one at a time. */
  setModels(models) {
    this.isFleet = models.some(({ state }) => state);
    if (this.isFleet && !models.some(({ id }) => id === this.models.chosen)) {
      this.models.chosen = (models.find(({ state }) => state === 'ready') ?? models[0]).id;
    }
  }

  #choose() {
    this.before = null;
    this.kind = null;
    this.#schedule(0);
  }

  appear() {
    this.shown = true;
    this.#schedule(0);
  }

  hide() {
    this.shown = false;
    clearTimeout(this.timer);
  }

  #schedule(pause = EVERY_MS) {
    clearTimeout(this.timer);
    if (!this.shown || document.hidden) return;
    this.timer = setTimeout(() => this.#look(), pause);
  }

  async #look() {
    try {
      const signal = AbortSignal.timeout(10_000);
      if (this.isFleet) this.models.draw((await getJson('v1/models', { signal })).data);
      const model = this.isFleet ? this.models.chosen : '';
      const query = model ? `?model=${encodeURIComponent(model)}` : '';
      const status = await getJson(`v1/status${query}`, { signal });
      if (!this.shown) return;
      if (model && status.model !== model) this.#empty(this.models.reason());
      else this.draw(status, performance.now());
    } catch (error) {
      this.before = null;
      if (error.status === 401) return;
      if (error.status) this.lead.textContent = error.message;
      else await untilHealthy();
    }
    this.#schedule();
  }

  #empty(message) {
    this.kind = this.told = this.toldFacts = this.before = null;
    this.lead.textContent = message;
    this.lead.className = 'lead';
    this.grid.replaceChildren();
    this.facts.replaceChildren();
    this.table.hidden = this.graphs.hidden = true;
  }

  /** Draw a status that came at `now`, in milliseconds. */
  draw(status, now) {
    this.lead.textContent = sentenceOf(status);
    this.lead.className = `lead ${status.state}`;
    if (this.kind !== status.kind) {
      this.kind = status.kind;
      this.charts = chartsOf(status.kind);
      this.grid.replaceChildren(...Object.values(this.charts).map((chart) => chart.element));
    }
    const { before } = this;
    const continues = before && before.status.started === status.started
      && before.status.restarts === status.restarts;
    const seconds = continues ? (now - before.now) / 1000 : null;
    const figures = figuresOf(status, continues ? before.status : null, seconds);
    for (const [name, chart] of Object.entries(this.charts)) chart.push(figures[name]);
    this.before = { status, now };
    this.#drawRequests(status);
    this.#drawGraphs(status);
    this.#drawFacts(status);
  }

  #drawRequests({ kind, requests, unfinished }) {
    this.table.hidden = kind !== 'text' && kind !== 'images';
    this.count.textContent = countOf(unfinished, requests.length);
    this.requests.replaceChildren(...requests.map((one) => h('tr', {}, h('td', {},
      h('code', {}, one.id)), h('td', {}, h('span', { class: `phase ${one.phase}` },
      one.steps ? `step ${one.step} of ${one.steps}` : one.phase)),
    h('td', {}, one.seconds.toFixed(1)), h('td', {}, orDash(one.prompt_tokens)),
    h('td', {}, orDash(one.cached_tokens)), h('td', {}, orDash(one.completion_tokens)))));
  }

  #drawGraphs({ info, stats }) {
    const told = info?.graphs ? JSON.stringify([info.graphs, stats.graph_fallbacks_total]) : '';
    if (told === this.told) return;
    this.told = told;
    this.graphs.hidden = !told;
    if (told) {
      this.graphs.replaceChildren(h('h2', {}, 'Graphs'),
        ...graphMap(info.graphs, stats.graph_fallbacks_total));
    }
  }

  #drawFacts(status) {
    const rows = Object.entries(factsOf(status));
    const told = JSON.stringify(rows);
    if (told === this.toldFacts) return;
    this.toldFacts = told;
    this.facts.replaceChildren(h('h2', {}, 'Server'), h('dl', { class: 'facts' },
      ...rows.flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])));
  }
}

function orDash(count) {
  return count === null || count === undefined ? '–' : whole(count);
}

function countOf(unfinished, shown) {
  if (!unfinished) return 'None run or wait.';
  if (!shown) return `${whole(unfinished)} run or wait.`;
  return unfinished > shown ? `${whole(unfinished)} run or wait; the oldest ${shown}:` : '';
}

function sentenceOf({ state, model, failure, silence }) {
  if (failure) return `The engine is gone: ${failure}`;
  if (state === 'ready') return `${model} is ready.`;
  if (state === 'unresponsive') return `The engine has been silent for ${silence.toFixed(0)} s.`;
  return `The engine is ${state}.`;
}

function chartsOf(kind) {
  const charts = {
    running: new Chart('Running', whole),
    waiting: new Chart('Waiting', whole, { tone: 'warn' }),
  };
  if (kind === 'text') {
    charts.speed = new Chart('Tokens/s', (value) => formatNumber(value, value < 10 ? 1 : 0));
    charts.prompts = new Chart('Prompt tokens/s', whole);
    charts.cache = new Chart('KV cache in use', percent, { most: 1, tone: 'good' });
    charts.hits = new Chart('Prefix cache hits', percent, { most: 1, tone: 'good' });
  } else if (kind === 'images') {
    charts.images = new Chart('Images made', whole, { tone: 'good' });
  }
  return charts;
}

/** The charts' values; null where nothing is known. `last`: the status before, `seconds` ago. */
function figuresOf({ stats }, last, seconds) {
  const grown = (name) => (last ? Math.max(0, stats[name] - last.stats[name]) : null);
  const rate = (name) => (last && seconds > 0 ? grown(name) / seconds : null);
  const asked = last ? grown('prompt_tokens_total') : 0;
  const hits = asked ? grown('cached_tokens_total') / asked
    : stats.cached_tokens_total / (stats.prompt_tokens_total || 1);
  return {
    running: stats.running_requests,
    waiting: stats.queued_requests,
    speed: rate('generation_tokens_total'),
    prompts: rate('prompt_tokens_total'),
    cache: stats.kv_tokens_total ? stats.kv_tokens_used / stats.kv_tokens_total : null,
    hits: stats.prompt_tokens_total ? Math.min(1, hits) : null,
    images: stats.images_total ?? null,
  };
}

/** What the server is, and what has gone wrong so far. */
function factsOf(status) {
  const { version, started, restarts, hangs, replicas, ended, aborted, info, stats } = status;
  const facts = { Version: version, 'Up since': new Date(started * 1000).toLocaleString() };
  if (info) {
    facts.Model = `${info.architecture}, ${info.dtype} on ${info.device}`;
    if (info.weight_bytes) facts.Weights = `${whole(info.weight_bytes / MIB)} MiB`;
    if (info.kv_tokens) {
      facts['KV cache'] = `${whole(info.kv_tokens)} tokens, ${whole(info.kv_bytes / MIB)} MiB`;
      facts['Context length'] = `${whole(info.context_length)} tokens`;
      facts.Attention = info.attention_backend;
    }
    facts['Running limit'] = whole(info.max_running_requests);
    Object.assign(facts, info.remarks);
  }
  if (replicas.length) facts.Replicas = replicas.join(', ');
  facts['Ended requests'] = `${whole(ended)}, ${whole(aborted)} of them aborted`;
  if (stats.draft_tokens_total) {
    const { accepted_tokens_total: accepted, draft_tokens_total: proposed } = stats;
    facts.Speculation = `${whole(accepted)} of ${whole(proposed)} proposed tokens accepted `
      + `(${percent(accepted / proposed)})`;
  }
  if (stats.encoded_images_total || stats.image_hits_total) {
    facts['Images in prompts'] = `${whole(stats.encoded_images_total)} encoded in `
      + `${formatNumber(stats.encoder_seconds_total, 1)} s, `
      + `${whole(stats.image_hits_total)} found, ${whole(stats.encoder_bytes / MIB)} MiB kept`;
  }
  if (stats.preemptions_total) facts.Preemptions = whole(stats.preemptions_total);
  for (const [stage, seconds] of Object.entries(stats.stage_seconds_total ?? {})) {
    facts[`Time in ${stage}`] = `${formatNumber(seconds, 1)} s`;
  }
  facts['Engine restarts'] = `${restarts}${hangs ? `, ${hangs} because it hung` : ''}`;
  for (const [kind, count] of Object.entries(status.errors)) {
    facts[`Errors: ${kind.replaceAll('_', ' ')}`] = whole(count);
  }
  return facts;
}
