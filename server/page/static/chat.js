// The view of chats: a conversation's messages, and where the next one is written.

import { answer } from './answer.js';
import { Attachments } from './attach.js';
import { ContextMeter } from './context.js';
import { announce, h, icon, iconButton, newId } from './dom.js';
import { MessageView } from './message.js';
import { askSettings, lastSettings, requestMembers } from './settings.js';
import { Sidebar } from './sidebar.js';
import { get, messagesOfConversation, put, tab } from './store.js';
import { Tree, messagesOf, titleOf } from './tree.js';

const SHOWN = 'piecework-conversation';
const SAVE_MS = 250;
const NEAR = 80;
const TALLEST = 240;

/**
 * `models()`: those that chat, `{id, state, context, images}` each. Answers that run go on while
 * others are looked at.
 */
export class Chat {
  constructor(models) {
    this.models = models;
    this.runs = new Map();
    this.views = new Map();
    this.sidebar = new Sidebar({
      open: (id) => this.open(id),
      create: () => this.create(),
      changed: (change) => {
        this.#take(change);
        this.tabs.postMessage(change);
      },
    });
    this.tabs = new BroadcastChannel('piecework');
    this.tabs.onmessage = ({ data }) => {
      this.#take(data);
      this.sidebar.refresh();
    };
    this.#build();
    this.tree = this.#newTree();
    document.addEventListener('visibilitychange', () => this.#saveRuns());
    addEventListener('pagehide', () => this.#saveRuns());
    this.ready = this.#begin();
  }

  async #begin() {
    const id = tab.get(SHOWN);
    if (!id || !(await this.open(id))) this.#show();
  }

  #build() {
    this.log = h('div', { class: 'log', role: 'region', 'aria-label': 'Messages', tabindex: '0' });
    this.empty = h('div', { class: 'empty' }, h('h2', {}, 'What shall it be?'),
      h('p', {}, 'The conversation stays in this browser.'));
    this.input = h('textarea', { rows: '1', placeholder: 'Write a message', 'aria-label': 'Message',
      oninput: () => this.#fit(), onkeydown: (event) => this.#key(event) });
    this.button = iconButton('send', 'Send', () => (this.#running() ? this.stop() : this.send()),
      { class: 'icon-button primary' });
    this.picker = h('select', { 'aria-label': 'Model', class: 'picker', onchange: () => {
      this.tree.info.model = this.picker.value;
      this.#drawContext();
    } });
    this.problem = h('p', { class: 'problem', role: 'alert' });
    this.attachments = new Attachments((text) => {
      this.problem.textContent = text;
    });
    this.context = new ContextMeter();
    this.latest = iconButton('down', 'To the latest', () => this.#toEnd(),
      { class: 'icon-button latest', hidden: true });
    this.log.addEventListener('scroll', () => this.#scrolled(), { passive: true });
    this.log.addEventListener('drawn', () => this.#follow());
    new ResizeObserver(() => this.#follow()).observe(this.log);
    this.element = h('div', { class: 'chat' }, h('h1', { class: 'unseen' }, 'Chat'),
      this.sidebar.element,
      h('section', { class: 'talk', 'aria-label': 'Conversation' },
        h('h2', { class: 'unseen' }, 'Messages'), this.log,
        h('div', { class: 'composer' }, this.latest, this.problem,
          h('div', { class: 'box' }, this.attachments.element, this.input,
            h('div', { class: 'row' }, this.picker,
              iconButton('sliders', 'Settings', () => this.#settings()), this.attachments.button,
              h('span', { class: 'spring' }), this.context.element, this.button)))));
    this.attachments.takeDrops(this.element);
    this.attachments.takePastes(this.input);
    this.sticks = true;
  }

  /** Offer the models that chat; the one that was chosen stays. */
  setModels() {
    const models = this.models();
    const chosen = this.tree.info.model ?? this.picker.value;
    this.picker.replaceChildren(...models.map(({ id, state }) => h(
      'option', { value: id }, state && state !== 'ready' ? `${id} (${state})` : id)));
    if (models.some(({ id }) => id === chosen)) this.picker.value = chosen;
    this.picker.disabled = models.length < 2;
    this.#drawContext();
  }

  // Conversations

  #newTree() {
    const now = Date.now();
    return new Tree({ id: newId(), title: '', created: now, updated: now, chosen: {},
      settings: lastSettings() });
  }

  create() {
    this.tree = this.#newTree();
    this.#show();
    this.input.focus();
  }

  /** Whether there is such a conversation. */
  async open(id) {
    const running = [...this.runs.values()].find(({ tree }) => tree.info.id === id);
    if (running) {
      this.tree = running.tree;
    } else {
      const info = await get('conversations', id);
      if (!info) return false;
      const nodes = await messagesOfConversation(id);
      for (const node of nodes) if (node.state === 'running') node.state = 'broken';
      this.tree = new Tree(info, nodes);
    }
    this.#show();
    return true;
  }

  /** What was done to a conversation, in the list or in another tab. */
  #take({ removed, renamed, title }) {
    if (removed) this.#removed(removed);
    for (const { info } of [this.tree, ...[...this.runs.values()].map(({ tree }) => tree)]) {
      if (info.id === renamed) info.title = title;
    }
  }

  #removed(id) {
    for (const { tree, controller } of this.runs.values()) {
      if (tree.info.id === id) {
        tree.gone = true;
        controller.abort();
      }
    }
    if (this.tree.info.id === id) this.create();
  }

  #show() {
    const { info } = this.tree;
    tab.set(SHOWN, info.id);
    this.sidebar.show(info.id);
    this.views.clear();
    this.log.replaceChildren();
    this.problem.textContent = '';
    this.setModels();
    this.#layOut();
    this.#toEnd();
    document.dispatchEvent(new Event('narrow-close'));
  }

  /** Show the chosen branch; views of messages that stay are kept. */
  #layOut() {
    const path = this.tree.path();
    const shown = path.map((node) => {
      if (!this.views.has(node.id)) this.views.set(node.id, this.#view(node));
      const view = this.views.get(node.id);
      view.refresh();
      return view.element;
    });
    const kept = new Set(shown);
    for (const old of [...this.log.children]) if (!kept.has(old)) old.remove();
    shown.forEach((element, index) => {
      const there = this.log.children[index] ?? null;
      if (there !== element) this.log.insertBefore(element, there);
    });
    if (!path.length) this.log.append(this.empty);
    this.#drawButton();
    this.#drawContext();
  }

  #model() {
    return this.models().find(({ id }) => id === this.picker.value);
  }

  #drawContext() {
    this.context.draw(this.tree.path(), this.#model()?.context);
    this.attachments.takesImages = this.#model()?.images ?? false;
  }

  #view(node) {
    return new MessageView(node, {
      siblings: (one) => this.tree.siblings(one),
      isLast: (one) => !this.tree.children.has(one.id),
      actions: {
        edit: (one, text) => this.#edit(one, text),
        again: (one) => this.#answer(this.#node('assistant', '', one.parent)),
        goOn: (one) => this.#answer(one),
        choose: (one, step) => this.#choose(one, step),
        answerCalls: (one, results) => this.#answerCalls(one, results),
      },
    });
  }

  #choose(node, step) {
    this.tree.choose(node, step);
    this.#layOut();
    put('conversations', this.tree.info);
    const { ids, index } = this.tree.siblings(this.tree.path().find(
      (one) => one.parent === node.parent));
    announce(`Branch ${index + 1} of ${ids.length}`);
  }

  // Messages

  #node(role, text, parent) {
    return {
      id: newId(), conversation: this.tree.info.id, parent, role, text, thought: '', calls: [],
      created: Math.max(Date.now(), this.created + 1 || 0), state: 'done', error: null,
      model: null, usage: null, timing: null, reason: null,
    };
  }

  /** Send what was written, at the end. */
  async send() {
    const { files } = this.attachments;
    const text = this.input.value;
    if ((!text.trim() && !files.length) || this.#running() || !this.#members()) return;
    this.input.value = '';
    this.#fit();
    await this.#ask(text, this.attachments.take(), this.tree.path().at(-1)?.id ?? null);
  }

  async #ask(text, files, parent) {
    const node = { ...this.#node('user', text, parent), files };
    this.created = node.created;
    const { tree } = this;
    if (!tree.info.title) tree.info.title = titleOf(text || files[0].name);
    tree.add(node);
    await Promise.all([this.#keep(node), this.#answer(this.#node('assistant', '', node.id))]);
  }

  /** Send an edited message, or keep an edited answer; returns false while another answer runs. */
  #edit(node, text) {
    if (this.#running()) {
      this.problem.textContent = 'An answer is under way: stop it, or wait for its end.';
      return false;
    }
    if (node.role === 'assistant') {
      const next = { ...this.#node('assistant', text, node.parent), calls: node.calls,
        state: node.calls.length ? 'done' : 'stopped', model: node.model };
      this.created = next.created;
      this.tree.add(next);
      this.#keep(next);
      this.#layOut();
      return true;
    }
    if (!this.#members()) return false;
    this.#ask(text, node.files ?? [], node.parent);
    return true;
  }

  /** What the settings add to a request; null where they cannot be sent, which is told. */
  #members() {
    try {
      return requestMembers(this.tree.info.settings);
    } catch (error) {
      this.problem.textContent = error.message;
      return null;
    }
  }

  #answerCalls(node, results) {
    if (!this.#members()) return;
    let parent = node.id;
    for (const [index, call] of node.calls.entries()) {
      const result = { ...this.#node('tool', results[index], parent), call: call.id };
      this.created = result.created;
      this.tree.add(result);
      this.#keep(result);
      parent = result.id;
    }
    this.#answer(this.#node('assistant', '', parent));
  }

  /** Fill a node by the model; one answer of a conversation at a time. */
  async #answer(node) {
    const { tree } = this;
    if (this.#running()) return;
    const members = this.#members();
    if (!members) return;
    this.problem.textContent = '';
    if (!tree.nodes.has(node.id)) tree.add(node);
    this.created = Math.max(this.created ?? 0, node.created);
    const controller = new AbortController();
    this.runs.set(node.id, { controller, node, tree });
    node.state = 'running';
    this.#layOut();
    this.#toEnd();
    announce('Answering');
    this.#keep(node, tree);
    let saved = performance.now();
    const before = tree.path(tree.nodes.get(node.parent));
    await answer(node, { ...members, model: this.picker.value || undefined,
      messages: messagesOf(before, tree.info.settings.system, this.#model()?.images) }, {
      signal: controller.signal,
      onchange: () => {
        this.views.get(node.id)?.refresh();
        if (performance.now() - saved > SAVE_MS) {
          saved = performance.now();
          this.#keep(node, tree);
        }
      },
    });
    this.runs.delete(node.id);
    tree.info.updated = Date.now();
    await this.#keep(node, tree);
    if (this.tree === tree) this.#layOut();
    this.sidebar.refresh();
    announce(node.state === 'failed' ? 'The answer failed' : 'The answer has ended');
  }

  stop() {
    for (const { controller, tree } of this.runs.values()) {
      if (tree === this.tree) controller.abort();
    }
  }

  #running() {
    return [...this.runs.values()].some(({ tree }) => tree === this.tree);
  }

  async #keep(node, tree = this.tree) {
    if (tree.gone) return;
    try {
      await put('messages', node);
      await put('conversations', tree.info);
      if (!this.sidebar.has(tree.info.id)) await this.sidebar.refresh();
    } catch (error) {
      this.problem.textContent = `This is not kept: ${error?.message ?? 'the browser refuses it'}`;
    }
  }

  #saveRuns() {
    for (const { node, tree } of this.runs.values()) this.#keep(node, tree);
  }

  async #settings() {
    const { tree } = this;
    const settings = await askSettings(tree.info.settings);
    if (!settings) return;
    tree.info.settings = settings;
    if (tree.info.title) await put('conversations', tree.info);
  }

  // Where one writes and reads

  #key(event) {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    } else if (event.key === 'ArrowUp' && !this.input.value) {
      const mine = this.tree.path().findLast((node) => node.role === 'user');
      if (mine && !this.#running()) {
        event.preventDefault();
        this.views.get(mine.id).edit();
      }
    }
  }

  #fit() {
    this.input.style.height = 'auto';
    this.input.style.height = `${Math.min(this.input.scrollHeight, TALLEST)}px`;
  }

  #drawButton() {
    const runs = this.#running();
    const label = runs ? 'Stop' : 'Send';
    if (this.button.title === label && this.button.childElementCount) return;
    this.button.title = label;
    this.button.setAttribute('aria-label', label);
    this.button.replaceChildren(icon(runs ? 'stop' : 'send'));
  }

  #scrolled() {
    const { log } = this;
    this.sticks = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    this.latest.hidden = this.sticks;
  }

  #follow() {
    if (this.sticks) this.log.scrollTop = this.log.scrollHeight;
    else this.latest.hidden = false;
  }

  #toEnd() {
    this.sticks = true;
    this.#follow();
  }
}
