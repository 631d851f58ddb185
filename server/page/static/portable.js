// Conversations as a file and back. A file may come from anybody: what is read are known members of
// known kinds, under new ids, and nothing of it is more than text.

import { IMAGE_URL } from './attach.js';
import { newId } from './dom.js';
import { cleanSettings } from './settings.js';
import { get, messagesOfConversation, put } from './store.js';
import { Tree, contentOf, fenced } from './tree.js';

const FORMAT = 'piecework-conversations';
const ROLES = new Set(['user', 'assistant', 'tool']);
const MOST_BYTES = 64 * 1024 * 1024;
const MOST_CONVERSATIONS = 10_000;
const MOST_MESSAGES = 100_000;
const MOST_CALLS = 128;
const MOST_FILES = 16;
const NAMES = { user: 'You', assistant: 'Answer', tool: 'Tool result' };

/** A file with these conversations. */
export async function exported(ids) {
  const conversations = [];
  for (const id of ids) {
    const info = await get('conversations', id);
    if (!info) continue;
    const { title, created, updated, settings, chosen } = info;
    const messages = await messagesOfConversation(id);
    messages.sort((one, two) => one.created - two.created);
    conversations.push({ title, created, updated, settings, chosen, messages: messages.map(
      ({ conversation, ...message }) => message) });
  }
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  return new Blob([text], { type: 'application/json' });
}

/** A file with the shown branch of a conversation in Markdown, without thoughts. */
export async function markdownOf(id) {
  const info = await get('conversations', id);
  const { system } = info.settings ?? {};
  const parts = [`# ${info.title}`, ...(system ? ['## System prompt', system] : [])];
  for (const node of new Tree(info, await messagesOfConversation(id)).path()) {
    parts.push(`## ${NAMES[node.role]}`, contentOf(node));
    for (const call of node.calls ?? []) {
      parts.push(`Calls \`${call.name}\``, fenced(call.arguments, 'json'));
    }
  }
  const text = parts.filter((part) => part !== '').join('\n\n');
  return new Blob([text, '\n'], { type: 'text/markdown' });
}

/** Keep a file's conversations; returns how many. Raises `Error` with what is wrong. */
export async function importFile(file) {
  if (file.size > MOST_BYTES) throw new Error('The file is larger than 64 MiB.');
  let told;
  try {
    told = JSON.parse(await file.text());
  } catch {
    throw new Error('The file is no JSON.');
  }
  if (told?.format !== FORMAT || !Array.isArray(told.conversations)) {
    throw new Error('The file holds no conversations of this page.');
  }
  if (told.conversations.length > MOST_CONVERSATIONS) {
    throw new Error(`The file holds more than ${MOST_CONVERSATIONS} conversations.`);
  }
  const read = told.conversations.map(conversationOf);
  const total = read.reduce((sum, one) => sum + one.messages.length, 0);
  if (total > MOST_MESSAGES) throw new Error(`The file holds more than ${MOST_MESSAGES} messages.`);
  for (const { info, messages } of read) {
    await put('messages', ...messages);
    await put('conversations', info);
  }
  return read.length;
}

function conversationOf(told) {
  const id = newId();
  const ids = new Map();
  const messages = [];
  for (const one of Array.isArray(told?.messages) ? told.messages : []) {
    const message = messageOf(one, id, ids);
    // A message comes after its parent, so that no message is its own ancestor.
    if (message) {
      ids.set(one.id, message.id);
      messages.push(message);
    }
  }
  const chosen = {};
  for (const [key, value] of Object.entries(told?.chosen ?? {})) {
    const parent = key === 'top' ? 'top' : ids.get(key);
    if (parent && ids.has(value)) chosen[parent] = ids.get(value);
  }
  const info = {
    id, title: text(told?.title).slice(0, 200).replace(/\s+/g, ' ').trim() || 'Imported', chosen,
    created: time(told?.created), updated: time(told?.updated),
    settings: cleanSettings(told?.settings),
  };
  return { info, messages };
}

function messageOf(told, conversation, ids) {
  if (typeof told?.id !== 'string' || !ROLES.has(told.role) || ids.has(told.id)) return null;
  const top = told.parent === null || told.parent === undefined;
  if (!top && !ids.has(told.parent)) return null;
  const calls = (Array.isArray(told.calls) ? told.calls.slice(0, MOST_CALLS) : []).map((call) => ({
    id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments),
  }));
  const files = (Array.isArray(told.files) ? told.files.slice(0, MOST_FILES) : []).map((file) => ({
    name: text(file?.name).slice(0, 200),
    ...(IMAGE_URL.test(text(file?.image)) ? { image: file.image } : { text: text(file?.text) }),
  }));
  return {
    id: newId(), conversation, parent: top ? null : ids.get(told.parent), role: told.role,
    text: text(told.text), files, thought: text(told.thought), calls, call: text(told.call) || null,
    model: text(told.model) || null, created: time(told.created),
    state: told.state === 'stopped' ? 'stopped' : 'done', error: null,
    reason: text(told.reason) || null, usage: null, timing: null,
  };
}

function text(value) {
  return typeof value === 'string' ? value : '';
}

function time(value) {
  return Number.isFinite(value) ? Math.min(Math.max(value, 0), Date.now()) : Date.now();
}
