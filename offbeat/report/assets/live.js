/* The live page: sliders and switches → a state → numbers and a timeline from the server, drawn.

   One replay is asked for at a time; what changes meanwhile is asked for when it is back, so that the newest state always
   wins and none in between is waited for. Memory and the other strategies follow once nothing has changed for a while.
   Texts that came from a trace are only ever set as text. */
"use strict";

(() => {
  const at = (id) => document.getElementById(id);
  const token = document.querySelector('meta[name="offbeat-token"]').content;
  const FACTORS = ["bandwidth", "latency", "compute"];
  const QUIET_MILLISECONDS = 250;
  const PART_NAMES = { compute: "compute", exposed: "exposed communication", waiting: "waiting for other ranks", idle: "idle" };
  const KIND_NAMES = { update: "update of one message", wait: "standing still" };
  let about = null, view = null, shown = null, busy = false, wanted = null, changedAt = 0, quiet = null;
  let ranking = { key: "", rows: new Map(), failed: new Map() };

  class Refused extends Error {}

  async function ask(name, content) {
    const reply = await fetch(`/api/${name}`, {
      method: "POST", body: JSON.stringify(content), cache: "no-store",
      headers: { "Content-Type": "application/json", "X-Offbeat-Token": token },
    });
    const answer = await reply.json();
    if (!reply.ok || answer.refused) throw new Refused(answer.refused || answer.error);
    return answer;
  }

  const factorOf = (id) => Number((2 ** Number(at(id).value)).toPrecision(3));
  const times = (factor) => `${Number(factor.toPrecision(3))}×`;

  function state() {
    const chosen = { strategy: at("strategy").value, wire: document.querySelector('input[name="wire"]:checked').value };
    for (const id of FACTORS) chosen[id] = factorOf(id);
    chosen.workers = about.workers[Number(at("workers").value)];
    chosen.straggler = factorOf("straggler");
    chosen.straggler_rank = Math.min(Math.max(Math.round(Number(at("straggler-rank").value)) || 0, 0), chosen.workers - 1);
    return chosen;
  }

  function bandwidthText(factor) {
    if (!about.bandwidth_bytes_per_second) return times(factor);
    let rate = 8 * about.bandwidth_bytes_per_second * factor, unit = 0;
    while (rate >= 1000 && unit < 4) { rate /= 1000; unit += 1; }
    return `${times(factor)} · ${Number(rate.toPrecision(3))} ${["", "k", "M", "G", "T"][unit]}bit/s`;
  }

  function showControls(chosen) {
    at("bandwidth-value").textContent = bandwidthText(chosen.bandwidth);
    at("latency-value").textContent = about.latency_seconds
      ? `${times(chosen.latency)} · ${Charts.seconds(Number((about.latency_seconds * chosen.latency).toPrecision(3)))}`
      : times(chosen.latency);
    at("compute-value").textContent = times(chosen.compute);
    at("workers-value").textContent = String(chosen.workers);
    at("straggler-value").textContent = chosen.straggler === 1 ? "none" : `${times(chosen.straggler)} as long`;
    at("straggler-rank").max = String(chosen.workers - 1);
    for (const id of [...FACTORS, "workers", "straggler"])
      at(id).setAttribute("aria-valuetext", at(`${id}-value`).textContent);
  }

  function changed() {
    changedAt = performance.now();
    wanted = state();
    showControls(wanted);
    clearTimeout(quiet);
    if (!busy) replayWanted();
  }

  async function replayWanted() {
    busy = true;
    at("results").setAttribute("aria-busy", "true");
    while (wanted) {
      const chosen = wanted, since = changedAt;
      wanted = null;
      try {
        if (chosen.strategy === "optimised" && !at("found").textContent) await searchHere(chosen);
        const answer = await ask("replay", chosen);
        await draw(answer, chosen, since);
        if (!wanted) tell("");
      } catch (error) {
        tell(explained(error));
      }
    }
    busy = false;
    at("results").setAttribute("aria-busy", "false");
    quiet = setTimeout(() => follow(state()), QUIET_MILLISECONDS);
  }

  const explained = (error) =>
    error instanceof Refused ? error.message : `The server does not answer: is offbeat view still running? (${error.message})`;

  function tell(sentence) {
    at("error").textContent = sentence;
    at("error").hidden = !sentence;
  }

  async function draw(answer, chosen, since) {
    const scene = await Timeline.decode(answer.scene);
    shown = answer;
    drawFacts(answer);
    drawParts(answer);
    if (view) view.setScene(scene);
    else {
      view = Timeline.create(at("timeline"), scene);
      window.timelineView = view;
    }
    drawKinds(answer);
    const whole = performance.now() - since;
    at("timing").textContent =
      `replayed in ${Charts.seconds(Number((answer.replay_milliseconds / 1e3).toPrecision(2)))}, drawn after ${Charts.seconds(Number((whole / 1e3).toPrecision(2)))}`;
    document.body.dataset.redrawMilliseconds = whole.toFixed(1);
    document.body.dataset.replayMilliseconds = answer.replay_milliseconds.toFixed(1);
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
    document.body.dataset.state = JSON.stringify(chosen);
  }

  function drawFacts(answer) {
    at("step").textContent = Charts.seconds(answer.step_seconds);
    at("words").textContent = `· ${answer.words}`;
    const gain = answer.speedup - 1, what = about.captured ? about.recorded_strategy : "recorded";
    at("change").textContent = Math.abs(gain) < 5e-4 ? `as ${about.captured ? "captured" : "recorded"}`
      : `${times(gain > 0 ? answer.speedup : 1 / answer.speedup)} as ${gain > 0 ? "fast" : "slow"} as ${what} (${Charts.percent(answer.step_seconds / answer.base_seconds - 1)})`;
    at("change").className = Math.abs(gain) < 5e-4 ? "same" : gain > 0 ? "better" : "worse";
    const bound = answer.bound;
    at("bound").textContent = bound ? Charts.seconds(bound.seconds) : "unknown";
    at("bound-about").textContent = bound
      ? `this work in any order: computing ${Charts.seconds(bound.compute_seconds)}, network ${Charts.seconds(bound.network_seconds)}; the step takes ${(answer.step_seconds / (bound.seconds || 1)).toFixed(2)}× that`
      : "no communication was recorded";
  }

  function drawParts(answer) {
    const parts = about.parts.map((key) => ({ key, label: PART_NAMES[key] || key }));
    Charts.legend(at("parts-legend"), parts);
    Charts.stacked(at("mean-bar"), { parts, rows: [{ label: "mean", values: answer.mean }] });
    Charts.stacked(at("rank-bars"), { parts, rows: answer.ranks, limit: 8 });
    at("rank-bars").hidden = answer.ranks.length < 2;
    at("notes").replaceChildren(...[...new Set([...about.notes, ...answer.notes])].map((note) => Charts.element("p", "note", note)));
  }

  function drawKinds(answer) {
    Charts.legend(at("kinds-legend"), answer.kinds.map((key) => ({ key, label: KIND_NAMES[key] || key })), "kind");
    const path = Charts.element("span", "legend-entry");
    path.append(Charts.element("span", "swatch outline"), Charts.element("span", "", "critical path"));
    at("kinds-legend").append(path);
  }

  // What may come later: memory, then the other strategies one by one, until something changes.
  async function follow(chosen) {
    const current = () => !busy && JSON.stringify(state()) === JSON.stringify(chosen);
    try {
      const memory = await ask("memory", chosen);
      if (current()) drawMemory(memory);
    } catch (error) {
      if (!current()) return;
      drawMemory({ rows: [], why: explained(error) });
    }
    await rankAll(chosen, current);
  }

  async function rankAll(chosen, current) {
    const key = JSON.stringify({ ...chosen, strategy: "" });
    if (ranking.key !== key) ranking = { key, rows: new Map(), failed: new Map() };
    if (!at("error").textContent && shown) ranking.rows.set(chosen.strategy, shown.step_seconds);
    drawRanking(chosen);
    for (const strategy of about.quick_first) {
      const known = ranking.rows.has(strategy) || ranking.failed.has(strategy);
      if (known || (strategy === "optimised" && !at("found").textContent)) continue;
      try {
        const answer = await ask("rank", { ...chosen, strategy });
        if (ranking.key === key) ranking.rows.set(strategy, answer.step_seconds);
      } catch (error) {
        if (!(error instanceof Refused)) return;
        ranking.failed.set(strategy, error.message);
      }
      if (!current()) return;
      drawRanking(chosen);
    }
    document.body.dataset.ranked = String(ranking.rows.size);
  }

  const nameOf = (strategy) => (strategy !== "recorded" ? strategy
    : about.captured ? `${about.recorded_strategy} (as captured)` : `recorded${about.recorded_strategy ? ` (${about.recorded_strategy})` : ""}`);

  function drawRanking(chosen) {
    const rows = [...ranking.rows].map(([strategy, seconds]) => ({ strategy, label: nameOf(strategy), seconds, about: "" }));
    rows.sort((left, right) => left.seconds - right.seconds);
    Charts.ranked(at("ranking"), { rows, base: ranking.rows.get("recorded") || (shown ? shown.step_seconds : 1) });
    [...at("ranking").querySelectorAll(".ranked-row")].forEach((item, number) => {
      item.dataset.strategy = rows[number].strategy;
      item.classList.toggle("chosen", rows[number].strategy === chosen.strategy);
    });
    const left = about.strategies.filter((name) => !ranking.rows.has(name) && !ranking.failed.has(name)
      && (name !== "optimised" || at("found").textContent)).length;
    at("ranking-about").textContent = left ? `On these links and workers, against the recorded strategy; ${left} to come.`
      : "On these links and workers, against the recorded strategy.";
    for (const [strategy, why] of ranking.failed)
      at("ranking").append(Charts.element("p", "pending", `${nameOf(strategy)}: ${why}`));
  }

  function drawMemory(memory) {
    const parts = about.memory_parts.map((key) => ({ key, label: key.replace("_", " ") }));
    at("memory-why").textContent = memory.why;
    at("memory-legend").replaceChildren();
    at("memory-bars").replaceChildren();
    if (!memory.rows.length) {
      at("memory").textContent = "unknown";
      at("memory-about").textContent = "";
      return;
    }
    Charts.legend(at("memory-legend"), parts.filter((part) => memory.rows.some((row) => row.bytes[part.key] > 0)));
    const fullest = memory.rows.reduce((most, row) => (row.total_bytes > most.total_bytes ? row : most));
    at("memory").textContent = Charts.bytes(fullest.total_bytes);
    const fits = fullest.total_bytes <= fullest.limit_bytes;
    at("memory-about").textContent = `${fits ? "of" : "more than the"} ${Charts.bytes(fullest.limit_bytes)} of its device`;
    at("memory-about").className = fits ? "" : "worse";
    const longest = Math.max(...memory.rows.map((row) => row.total_bytes));
    for (const row of memory.rows.slice(0, 32)) at("memory-bars").append(memoryBar(parts, row, longest));
  }

  function memoryBar(parts, row, longest) {
    const line = Charts.element("div", "bar-row memory-row"), track = Charts.element("div", "bar-track");
    for (const part of parts) {
      const value = row.bytes[part.key];
      if (value <= 0) continue;
      const piece = Charts.element("div", "bar-piece");
      piece.style.background = `var(--part-${part.key})`;
      piece.style.width = `${(100 * value) / longest}%`;
      piece.title = `${part.label}: ${Charts.bytes(value)}`;
      track.append(piece);
    }
    if (row.limit_bytes <= longest) {
      const mark = Charts.element("div", "bar-mark");
      mark.style.left = `${(100 * row.limit_bytes) / longest}%`;
      mark.title = `its device has ${Charts.bytes(row.limit_bytes)}`;
      track.append(mark);
    }
    line.append(Charts.element("span", "bar-label", row.label), track,
      Charts.element("span", "bar-value", Charts.bytes(row.total_bytes)));
    return line;
  }

  async function searchHere(chosen) {
    at("search").disabled = true;
    at("search").textContent = "Searching…";
    try {
      const found = await ask("search", { ...chosen, strategy: "recorded", wire: "recorded" });
      at("found").textContent = `Found for ${found.for}: ${Charts.seconds(found.step_seconds)} per step.`;
      ranking = { key: "", rows: new Map(), failed: new Map() };
    } finally {
      at("search").disabled = false;
      at("search").textContent = "Search for the best here";
    }
  }

  async function onSearch() {
    try {
      await searchHere(state());
      at("strategy").value = "optimised";
      changed();
    } catch (error) { tell(explained(error)); }
  }

  function fillControls() {
    at("title").textContent = about.title;
    document.title = `${about.title} · Offbeat`;
    at("subtitle").textContent = `${about.world} rank${about.world === 1 ? "" : "s"} · `
      + (about.captured ? `captured, not run: times come from the devices' and the links' figures` : "recorded");
    at("against").textContent = about.measured_seconds
      ? `measured ${Charts.seconds(about.measured_seconds)}; replay as it was says ${Charts.seconds(about.base_seconds)} (${Charts.percent(about.base_seconds / about.measured_seconds - 1)})`
      : `${Charts.seconds(about.base_seconds)} as it was`;
    at("workers").max = String(about.workers.length - 1);
    at("workers").defaultValue = String(about.workers.indexOf(about.world));
    at("strategy").append(...about.strategies.map((name) => Charts.element("option", "", nameOf(name), { value: name })));
    for (const wire of about.wires) {
      const label = Charts.element("label"), input = Charts.element("input", "", null, { type: "radio", name: "wire", value: wire });
      input.defaultChecked = wire === "recorded";
      label.append(input, wire === "recorded" ? "as it was" : wire);
      at("wire").append(label);
    }
    const why = Object.entries(about.unavailable);
    for (const [kind] of why)
      for (const input of kind === "wire" ? at("wire").querySelectorAll("input") : [at(kind)]) input.disabled = true;
    at("search").hidden = "strategy" in about.unavailable;
    at("workers").disabled ||= about.workers.length < 2;
    at("unavailable").textContent = why.length
      ? `Not here: ${why.map(([kind]) => kind).join(", ")}, because ${why[0][1]}.` : "";
  }

  function connect() {
    at("controls").addEventListener("input", changed);
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("controls").addEventListener("reset", () => setTimeout(changed));
    at("search").addEventListener("click", onSearch);
    at("zoom-in").addEventListener("click", () => view && view.zoom(0.5));
    at("zoom-out").addEventListener("click", () => view && view.zoom(2));
    at("zoom-fit").addEventListener("click", () => view && view.fit());
    at("critical").addEventListener("click", () => view && view.toggleCritical());
    at("timeline").addEventListener("critical", (event) => at("critical").setAttribute("aria-pressed", String(event.detail)));
  }

  Charts.switchTheme(at("theme"));

  async function begin() {
    about = await ask("about", {});
    fillControls();
    connect();
    changed();
  }

  begin().catch((error) => tell(explained(error)));
})();
