/* The live page: sliders and switches → a state → numbers and a timeline from the server, drawn.

   One replay is asked for at a time; what changes meanwhile is asked for when it is back, or has taken long enough to be
   ended, so that the newest state always wins and none in between is waited for. Memory and the other strategies follow
   once nothing has changed for a while. Texts that came from a trace are only ever set as text. */
"use strict";

(() => {
  const at = (id) => document.getElementById(id);
  const token = document.querySelector('meta[name="offbeat-token"]').content;
  const FACTORS = ["bandwidth", "latency", "compute"];
  const QUIET_MILLISECONDS = 250;
  const SLOW_MILLISECONDS = 500;
  let about = null, view = null, shown = null, searched = null, refusedAddress = "";
  let running = null, later = null, busy = false, wanted = null, changedAt = 0, quiet = null;
  let ranking = { key: "", rows: new Map(), failed: new Map() };

  class Refused extends Error {}

  async function ask(name, content, signal = null) {
    const reply = await fetch(`/api/${name}`, {
      method: "POST", body: JSON.stringify(content), cache: "no-store", signal,
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
    chosen.straggler_rank = Number(at("straggler-rank").value);
    return chosen;
  }

  // Controls as a state has them; what the page does not have, such as a strategy of another version, stays as it was.
  function setControls(chosen) {
    for (const id of [...FACTORS, "straggler"]) if (chosen[id] > 0) at(id).value = String(Math.log2(chosen[id]));
    if (about.workers.includes(chosen.workers)) at("workers").value = String(about.workers.indexOf(chosen.workers));
    if (about.strategies.includes(chosen.strategy)) at("strategy").value = chosen.strategy;
    const wire = [...at("wire").querySelectorAll("input")].find((input) => input.value === chosen.wire);
    if (wire) wire.checked = true;
    if (chosen.straggler_rank >= 0) at("straggler-rank").value = String(chosen.straggler_rank);
  }

  // The address has what differs from the recording, so that it can be kept and shared.
  function keepInAddress(chosen) {
    const first = { bandwidth: 1, latency: 1, compute: 1, straggler: 1, workers: about.world, strategy: "recorded", wire: "recorded" };
    const kept = Object.entries(chosen).filter(([key, value]) =>
      (key === "straggler_rank" ? chosen.straggler !== 1 : value !== first[key]));
    history.replaceState(null, "", kept.length ? `#${new URLSearchParams(kept)}` : location.pathname + location.search);
  }

  function readAddress() {
    const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    for (const key of [...FACTORS, "straggler", "workers", "straggler_rank"]) if (key in given) given[key] = Number(given[key]);
    setControls(given);
    const chosen = state(), refused = Object.entries(given).filter(([key, value]) => chosen[key] !== value);
    refusedAddress = refused.length ? `The address asks for ${new URLSearchParams(refused).toString().replaceAll("&", ", ")}, `
      + "which this page does not have; the controls show what is replayed instead." : "";
  }

  function refusal(chosen) {
    const rank = chosen.straggler_rank, last = chosen.workers - 1;
    return Number.isInteger(rank) && rank >= 0 && rank <= last ? ""
      : `straggler: rank ${at("straggler-rank").value || "(none)"} is outside the job's ranks 0 to ${last}`;
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
    const chosen = state(), refused = refusal(chosen);
    showControls(chosen);
    clearTimeout(quiet);
    if (later) later.abort();
    wanted = refused ? null : chosen;
    tell(refused);
    if (refused) return;
    keepInAddress(chosen);
    if (!busy) replayWanted();
    else if (running && running.slow()) running.abort();
  }

  async function replayWanted() {
    busy = true;
    at("results").setAttribute("aria-busy", "true");
    while (wanted) {
      const chosen = wanted, since = changedAt;
      wanted = null;
      try {
        if (chosen.strategy === "optimised" && !searched) await searchHere(chosen);
        const answer = await cancellable("Replaying", (signal) => ask("replay", chosen, signal));
        await draw(answer, chosen, since);
        if (!wanted && !refusal(state())) tell("");
      } catch (error) {
        if (error.name !== "AbortError") tell(explained(error));
        else if (!wanted) goBack();
      }
    }
    busy = false;
    at("results").setAttribute("aria-busy", "false");
    quiet = setTimeout(() => follow(state()), QUIET_MILLISECONDS);
  }

  // Says how long the server has worked once that is longer than a moment, and lets the user end it: the server stops
  // when the request is aborted.
  async function cancellable(doing, work) {
    const controller = new AbortController(), since = performance.now();
    const passed = () => performance.now() - since;
    const own = { abort: () => controller.abort(), slow: () => passed() >= SLOW_MILLISECONDS };
    running = own;
    const tick = setInterval(() => {
      if (running !== own || !own.slow()) return;
      at("progress").hidden = false;
      at("progress-words").textContent = `${doing} for ${(passed() / 1e3).toFixed(0)} s.`;
    }, 100);
    try {
      return await work(controller.signal);
    } finally {
      clearInterval(tick);
      if (running === own) {
        running = null;
        at("progress").hidden = true;
      }
    }
  }

  function goBack() {
    if (!document.body.dataset.state) return;
    const last = JSON.parse(document.body.dataset.state);
    setControls(last);
    showControls(last);
    keepInAddress(last);
  }

  async function download() {
    try {
      const made = await ask("strategy", state());
      const link = Charts.element("a", "", null, { download: made.file, href: URL.createObjectURL(new Blob([made.content])) });
      link.click();
      URL.revokeObjectURL(link.href);
      at("saved").textContent = `Saved as ${made.file}: offbeat run --strategy ${made.file} takes it.`;
    } catch (error) { tell(explained(error)); }
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
    const kind = Charts.verdict(answer.base_seconds, answer.step_seconds);
    at("change").textContent = kind === "same" ? `as ${about.captured ? "captured" : "recorded"}`
      : `predicted ${Charts.speedup(answer.base_seconds, answer.step_seconds)} as ${about.captured ? about.recorded_strategy : "measured"}`;
    at("bounds").textContent = answer.bounds ? ` ${answer.bounds}` : "";
    at("change").className = kind;
    at("timeline-title").textContent = answer.measured ? "Timeline, as recorded" : "Two steps, replayed";
    const bound = answer.bound;
    at("bound").textContent = bound ? Charts.seconds(bound.seconds) : "unknown";
    at("bound-about").textContent = bound
      ? `this work in any order: computing ${Charts.seconds(bound.compute_seconds)}, network ${Charts.seconds(bound.network_seconds)}; the step takes ${(answer.step_seconds / (bound.seconds || 1)).toFixed(2)}× that`
      : "no communication was recorded";
  }

  function drawParts(answer) {
    const parts = about.parts;
    Charts.legend(at("parts-legend"), parts);
    Charts.stacked(at("mean-bar"), { parts, rows: [{ label: "mean", values: answer.mean }] });
    Charts.stacked(at("rank-bars"), { parts, rows: answer.ranks, limit: 8 });
    at("rank-bars").hidden = answer.ranks.length < 2;
    at("idle").replaceChildren(...Object.entries(answer.idle).map(([reason, seconds]) =>
      Charts.element("li", "", `idle ${Charts.seconds(Number(seconds.toPrecision(4)))} ${about.idle[reason]}`)));
    const notes = new Set([refusedAddress, ...about.notes, ...answer.notes].filter(Boolean));
    at("notes").replaceChildren(...[...notes].map((note) => Charts.element("p", "note", note)));
  }

  function drawKinds(answer) {
    Charts.legend(at("kinds-legend"), answer.kinds, "kind");
    const path = Charts.element("span", "legend-entry");
    path.append(Charts.element("span", "swatch outline"), Charts.element("span", "", "critical path"));
    at("kinds-legend").append(path);
  }

  // What may come later: memory, then the other strategies one by one, until something changes.
  async function follow(chosen) {
    const { signal } = later = new AbortController();
    try {
      drawMemory(await ask("memory", chosen, signal));
    } catch (error) {
      if (signal.aborted) return;
      drawMemory({ rows: [], why: explained(error) });
    }
    await rankAll(chosen, signal);
  }

  async function rankAll(chosen, signal) {
    const key = JSON.stringify({ ...chosen, strategy: "" });
    if (ranking.key !== key) ranking = { key, rows: new Map(), failed: new Map() };
    if (!at("error").textContent && shown) ranking.rows.set(chosen.strategy, shown);
    drawRanking(chosen);
    for (const strategy of about.quick_first) {
      const known = ranking.rows.has(strategy) || ranking.failed.has(strategy);
      if (known || (strategy === "optimised" && !searched)) continue;
      try {
        const answer = await ask("rank", { ...chosen, strategy }, signal);
        ranking.rows.set(strategy, answer);
      } catch (error) {
        if (!(error instanceof Refused)) return;
        ranking.failed.set(strategy, error.message);
      }
      drawRanking(chosen);
    }
    document.body.dataset.ranked = String(ranking.rows.size);
  }

  const nameOf = (strategy) => (strategy !== "recorded" ? strategy
    : about.captured ? `${about.recorded_strategy} (as captured)` : `recorded${about.recorded_strategy ? ` (${about.recorded_strategy})` : ""}`);

  function drawRanking(chosen) {
    const alike = new Map();
    // Strategies whose steps read the same share a row.
    const quickest = [...ranking.rows].sort((left, right) => left[1].step_seconds - right[1].step_seconds);
    for (const [strategy, { step_seconds: seconds, bounds }] of quickest) {
      const key = Charts.seconds(seconds);
      if (!alike.has(key)) alike.set(key, { names: [], seconds, bounds, about: "" });
      alike.get(key).names.push(strategy);
    }
    const rows = [...alike.values()].map((row) => ({ ...row, label: row.names.map(nameOf).join(", ") }));
    Charts.ranked(at("ranking"), { rows, base: about.base_seconds });
    [...at("ranking").querySelectorAll(".ranked-row")].forEach((item, number) => {
      item.dataset.strategies = rows[number].names.join(" ");
      item.classList.toggle("chosen", rows[number].names.includes(chosen.strategy));
    });
    at("ranking-card").hidden = about.strategies.length < 2;
    const left = about.strategies.filter((name) => !ranking.rows.has(name) && !ranking.failed.has(name)
      && (name !== "optimised" || searched)).length;
    const against = about.captured ? `${about.recorded_strategy} as captured` : "the measured step";
    at("ranking-about").textContent = `On these links and workers, against ${against} `
      + `(${Charts.seconds(about.base_seconds)})${left ? `; ${left} to come` : ""}.`;
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
    const limit = fullest.limit_bytes, fits = !limit || fullest.total_bytes <= limit;
    at("memory-about").textContent = !limit ? "the recording does not tell what its device has"
      : `${fits ? "of" : "more than the"} ${Charts.bytes(limit)} of its device`;
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
    if (row.limit_bytes && row.limit_bytes <= longest) {
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
      const here = { ...chosen, strategy: "recorded", wire: "recorded" };
      showFound(await cancellable("Searching", (signal) => ask("search", here, signal)));
      ranking = { key: "", rows: new Map(), failed: new Map() };
    } finally {
      at("search").disabled = false;
      at("search").textContent = "Search for the best here";
    }
  }

  function showFound(found) {
    searched = found;
    at("found").textContent = found ? `Found for ${found.for}: ${Charts.seconds(found.step_seconds)} per step ${found.bounds}.` : "";
  }

  async function onSearch() {
    try {
      await searchHere(state());
      at("strategy").value = "optimised";
      changed();
    } catch (error) { if (error.name !== "AbortError") tell(explained(error)); }
  }

  function fillControls() {
    at("title").textContent = about.title;
    document.title = `${about.title} · Offbeat`;
    at("subtitle").textContent = `${about.world} rank${about.world === 1 ? "" : "s"} · `
      + (about.captured ? `captured, not run: times come from the devices' and the links' figures` : "recorded");
    at("against").textContent = about.measured_seconds
      ? `measured ${Charts.seconds(about.measured_seconds)}, median; replay of it is off by ${Charts.percent(about.replayed_seconds / about.measured_seconds - 1)}`
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
    at("search").hidden = at("download").hidden = "strategy" in about.unavailable;
    at("workers").disabled ||= about.workers.length < 2;
    at("unavailable").textContent = why.length
      ? `Not here: ${why.map(([kind]) => kind).join(", ")}, because ${why[0][1]}.` : "";
  }

  function connect() {
    const byHand = () => { refusedAddress = ""; changed(); };
    at("controls").addEventListener("input", byHand);
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("controls").addEventListener("reset", () => setTimeout(byHand));
    at("search").addEventListener("click", onSearch);
    at("download").addEventListener("click", download);
    at("cancel").addEventListener("click", () => { wanted = null; if (running) running.abort(); });
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
    showFound(about.found);
    readAddress();
    connect();
    changed();
  }

  begin().catch((error) => tell(explained(error)));
})();
