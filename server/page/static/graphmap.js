// How the forward is cut, and which sizes of it are graphs: what `piecework explain` prints, drawn
// from what the engine has so far.

import { formatNumber, h } from './dom.js';

const MIB = 2 ** 20;

/** The map of an engine's `graphs`, with the reasons why steps ran without one. */
export function graphMap(graphs, fallbacks) {
  const parts = [h('p', { class: 'note' }, `Prefill: ${graphs.prefill_backend}. Decode: ${
    graphs.decode_backend}.${graphs.num_graphs ? ` ${formatNumber(graphs.num_graphs)} graphs, ${
    formatNumber(graphs.graph_bytes / MIB)} MiB, captured in ${
    graphs.capture_seconds.toFixed(1)} s.` : ''}`)];
  if (graphs.calls.length) parts.push(forward(graphs));
  else if (graphs.prefill_backend === 'piecewise') {
    parts.push(h('p', {}, 'The pieces are not there yet; until then steps run eagerly.'));
  }
  parts.push(sizes('Prefill, tokens', graphs.prefill_sizes, 'captured'),
    sizes('Decode, requests', graphs.decode_sizes, 'captured'),
    sizes('Still to be captured', graphs.pending_sizes, 'pending'),
    reasons('Passes, with their matches', graphs.passes),
    reasons('Passes that are off', graphs.passes_off),
    reasons('Sizes without a graph', graphs.failed_sizes),
    reasons('Steps without a graph', fallbacks));
  return parts.filter(Boolean);
}

/** The calls in order: pieces, and the ops that they are cut at. */
function forward({ calls, distinct_pieces: distinct }) {
  const total = calls.reduce((sum, { piece, times }) => sum + (piece === null ? 0 : times), 0);
  const order = h('ol', { class: 'forward', 'aria-label': 'The forward, in order' });
  for (const { piece, op, times, kinds } of calls) {
    order.append(h('li', {},
      piece === null ? null : h('span', { class: `piece tone-${piece % 6}`,
        title: `Piece ${piece}, of ${kinds} kinds of ops` }, `piece ${piece}`),
      op === null ? null : h('span', { class: 'cut' }, op.replace('piecework::', '')),
      times > 1 ? h('span', { class: 'times' }, `× ${times}`) : null));
  }
  return h('div', {}, h('p', {}, `${formatNumber(total)} pieces, ${distinct} of them distinct.`),
    order);
}

function sizes(label, numbers, kind) {
  if (!numbers.length) return null;
  return h('div', { class: 'sizes' }, h('h3', {}, label),
    h('ul', {}, ...numbers.map((number) => h('li', { class: kind }, formatNumber(number)))));
}

function reasons(label, table) {
  const entries = Object.entries(table ?? {});
  if (!entries.length) return null;
  return h('div', { class: 'sizes' }, h('h3', {}, label), h('dl', {}, ...entries.flatMap(
    ([name, value]) => [h('dt', {}, String(name).replaceAll('_', ' ')),
      h('dd', {}, typeof value === 'number' ? formatNumber(value) : value.replaceAll('_', ' '))])));
}
