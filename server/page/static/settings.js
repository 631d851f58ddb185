// What is sent with a conversation beside its messages: the system prompt and the parameters.

import { h } from './dom.js';

const KEPT = 'piecework-settings';
const EFFORTS = ['none', 'minimal', 'low', 'medium', 'high', 'xhigh'];
const OWN = 'the model’s own';
/** Members of the API's request by their names. */
const NUMBERS = [
  ['temperature', { min: '0', max: '2', step: '0.01' }, OWN],
  ['top_p', { min: '0', max: '1', step: '0.01' }, OWN],
  ['top_k', { min: '-1', step: '1' }, OWN],
  ['min_p', { min: '0', max: '1', step: '0.01' }, OWN],
  ['max_tokens', { min: '1', step: '1' }, 'what fits'],
  ['seed', { min: '0', step: '1' }, 'drawn'],
  ['frequency_penalty', { min: '-2', max: '2', step: '0.01' }, OWN],
  ['presence_penalty', { min: '-2', max: '2', step: '0.01' }, OWN],
  ['repetition_penalty', { min: '0.01', max: '2', step: '0.01' }, OWN],
];
const TEXTS = ['system', 'effort', 'stop', 'schema', 'tools'];
const MOST_TEXT = 200_000;

/** Settings of these members alone, each of its kind; the rest is left out. */
export function cleanSettings(given) {
  const settings = {};
  for (const name of TEXTS) {
    if (typeof given?.[name] === 'string') settings[name] = given[name].slice(0, MOST_TEXT);
  }
  for (const [name] of NUMBERS) {
    if (Number.isFinite(given?.[name])) settings[name] = given[name];
  }
  if (settings.effort && !EFFORTS.includes(settings.effort)) delete settings.effort;
  return settings;
}

/** Those of a new conversation: the last ones that were chosen. */
export function lastSettings() {
  try {
    return cleanSettings(JSON.parse(localStorage.getItem(KEPT) ?? '{}'));
  } catch {
    return {};
  }
}

/** Members of the API's request. Raises `Error` for texts that are no JSON. */
export function requestMembers(settings) {
  const members = {};
  for (const [name] of NUMBERS) {
    if (settings[name] !== undefined) members[name] = settings[name];
  }
  const stop = stopStrings(settings.stop);
  if (stop.length) members.stop = stop;
  if (settings.effort) members.reasoning_effort = settings.effort;
  if (settings.schema?.trim()) {
    const schema = parsed(settings.schema, 'JSON schema');
    members.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema } };
  }
  if (settings.tools?.trim()) {
    const tools = parsed(settings.tools, 'Tools');
    members.tools = (Array.isArray(tools) ? tools : [tools]).map((tool) => (
      tool?.type ? tool : { type: 'function', function: tool }));
  }
  return members;
}

/** One a line; `\n` and `\t` in it stand for a line's end and a tab. */
function stopStrings(text = '') {
  return text.split('\n').filter((line) => line !== '').map((line) => line.replace(
    /\\([nt\\])/g, (_, sign) => ({ n: '\n', t: '\t', '\\': '\\' })[sign]));
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

/** A dialog over a conversation's settings; resolves to new ones, or null where it was closed. */
export function askSettings(settings) {
  return new Promise((resolve) => {
    const fields = {};
    const field = (name, label, element, help = null) => {
      fields[name] = element;
      element.id = `setting-${name}`;
      return h('div', { class: 'field' }, h('label', { for: element.id }, label), element,
        help && h('small', {}, help));
    };
    const area = (name, rows) => h('textarea', {
      rows, value: settings[name] ?? '', spellcheck: name === 'system' ? null : 'false',
      class: name === 'system' ? null : 'mono',
    });
    const effort = h('select', {}, h('option', { value: '' }, 'the model’s own'),
      ...EFFORTS.map((one) => h('option', { value: one }, one)));
    effort.value = settings.effort ?? '';
    const problem = h('p', { class: 'problem', role: 'alert' });
    const dialog = h('dialog', { class: 'settings', 'aria-labelledby': 'settings-title' });
    const submit = (event) => {
      event.preventDefault();
      const next = {};
      for (const name of TEXTS) if (fields[name].value.trim()) next[name] = fields[name].value;
      for (const [name] of NUMBERS) {
        if (fields[name].value !== '') next[name] = Number(fields[name].value);
      }
      try {
        requestMembers(next);
      } catch (error) {
        problem.textContent = error.message;
        return;
      }
      try {
        localStorage.setItem(KEPT, JSON.stringify(cleanSettings(next)));
      } catch { /* too long, or not kept here */ }
      resolve(cleanSettings(next));
      dialog.close();
    };
    dialog.append(h('form', { onsubmit: submit },
      h('h2', { id: 'settings-title' }, 'Settings'),
      field('system', 'System prompt', area('system', 4)),
      h('div', { class: 'fields' }, ...NUMBERS.map(([name, limits, placeholder]) => field(
        name, name, h('input', {
          type: 'number', inputmode: 'decimal', placeholder, value: settings[name] ?? '', ...limits,
        }))),
      field('effort', 'reasoning_effort', effort)),
      field('stop', 'stop', area('stop', 2), 'Strings that end the answer, one a line.'),
      h('details', { open: Boolean(settings.schema) }, h('summary', {}, 'JSON schema of answers'),
        field('schema', 'JSON schema', area('schema', 6))),
      h('details', { open: Boolean(settings.tools) }, h('summary', {}, 'Tools'),
        field('tools', 'Functions, as JSON', area('tools', 6),
          'A list of {"name", "description", "parameters"}. You type what their calls give.')),
      problem,
      h('p', { class: 'keys' }, h('kbd', {}, '/'), ' write · ', h('kbd', {}, 'Enter'), ' send · ',
        h('kbd', {}, 'Esc'), ' stop · ', h('kbd', {}, 'Alt+N'), ' new conversation · ',
        h('kbd', {}, '↑'), ' edit the last message'),
      h('div', { class: 'row end' },
        h('button', { type: 'button', onclick: () => dialog.close() }, 'Cancel'),
        h('button', { class: 'primary' }, 'Save'))));
    dialog.addEventListener('close', () => {
      dialog.remove();
      resolve(null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
