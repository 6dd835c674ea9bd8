/* Numbers → text with units, and plain values → bar charts in HTML. No framework; texts are only ever set as text.

   Charts.seconds(0.00123) → "1.23 ms"      Charts.bytes(2 ** 20) → "1 MiB"      Charts.percent(0.031) → "+3.1%"

   Charts.stacked(container, {parts, rows, limit, onPick})
     parts  [{key, label}]; a part is coloured by the CSS variable --part-KEY
     rows   [{label, values: {KEY: seconds}, about}]
     limit  rows shown before "show all" (default 16); onPick(row number) makes the labels buttons
   Charts.ranked(container, {rows, base})
     rows   [{label, seconds, bounds, about}], base: seconds that each bar is compared with
   Charts.steps(container, {seconds, parts, rows, chosen, onPick})
     a column per step: seconds [numbers], rows [{KEY: seconds}] or null, chosen: its number or -1
   Charts.speedup(0.2, 0.1) → "2.00× as fast"; Charts.verdict(0.2, 0.1) → "better", "same" or "worse"
   Charts.legend(container, [{key, label}], prefix)
   Charts.switchTheme(button)
     light or dark as the system has it, until the button is pressed
   Charts.copyButtons()
     makes every button with data-copy copy the text before it
   Charts.element(tag, className, text, attributes) → HTMLElement

   Each call replaces what the container held. */
"use strict";

const Charts = (() => {
  const short = (number) =>
    Math.abs(number) >= 1e4 ? number.toFixed(0) : String(Number(number.toPrecision(4)));

  function seconds(value) {
    for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
      if (Math.abs(value) >= size * 0.99995) return `${short(value / size)} ${unit}`;
    return value === 0 ? "0 s" : `${short(value / 1e-9)} ns`;
  }

  function bytes(count) {
    const prefixes = ["", "Ki", "Mi", "Gi", "Ti", "Pi"];
    let power = 0;
    while (Math.abs(count) >= 1024 && power < prefixes.length - 1) { count /= 1024; power += 1; }
    return `${short(count)} ${prefixes[power]}B`;
  }

  // As `offbeat.units.format_speedup`.
  const same = (before, after) => Math.abs(before / after - 1) < 5e-3;
  const speedup = (before, after) => (same(before, after) ? "as fast"
    : before > after ? `${(before / after).toFixed(2)}× as fast` : `${(after / before).toFixed(2)}× as slow`);
  const verdict = (before, after) => (same(before, after) ? "same" : before > after ? "better" : "worse");

  const percent = (share, signed = true) =>
    `${signed && share > 0 ? "+" : ""}${(100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)}%`.replace("-", "−");

  function element(tag, className = "", text = null, attributes = {}) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== null) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  const total = (values) => Object.values(values).reduce((sum, value) => sum + value, 0);

  function legend(container, parts, prefix = "part") {
    container.replaceChildren();
    for (const part of parts) {
      const entry = element("span", "legend-entry");
      const swatch = element("span", "swatch", null, { "aria-hidden": "true" });
      swatch.style.background = `var(--${prefix}-${part.key})`;
      entry.append(swatch, element("span", "", part.label));
      container.append(entry);
    }
  }

  function bar(parts, values, longest) {
    const track = element("div", "bar-track");
    for (const part of parts) {
      const value = values[part.key] || 0;
      if (value <= 0) continue;
      const piece = element("div", "bar-piece");
      piece.style.background = `var(--part-${part.key})`;
      piece.style.width = `${(100 * value) / longest}%`;
      piece.title = `${part.label}: ${seconds(value)} (${percent(value / (total(values) || 1), false)})`;
      track.append(piece);
    }
    return track;
  }

  function stacked(container, { parts, rows, limit = 16, onPick = null }) {
    container.replaceChildren();
    const longest = Math.max(...rows.map((row) => total(row.values)), 1e-12);
    const list = element("div", "bars", null, { role: "list" });
    rows.forEach((row, number) => {
      const line = element("div", "bar-row", null, { role: "listitem" });
      const spoken = parts.map((part) => `${part.label} ${seconds(row.values[part.key] || 0)}`).join(", ");
      line.setAttribute("aria-label", `${row.label}: ${spoken}`);
      const label = onPick ? element("button", "bar-label link", row.label, { type: "button" })
                           : element("span", "bar-label", row.label);
      if (onPick) label.addEventListener("click", () => onPick(number));
      line.append(label, bar(parts, row.values, longest), element("span", "bar-value", row.about || seconds(total(row.values))));
      line.hidden = number >= limit;
      list.append(line);
    });
    container.append(list);
    if (rows.length > limit) {
      const more = element("button", "quiet", `Show all ${rows.length}`, { type: "button" });
      more.addEventListener("click", () => {
        for (const line of list.children) line.hidden = false;
        more.remove();
      });
      container.append(more);
    }
  }

  function ranked(container, { rows, base }) {
    container.replaceChildren();
    const longest = Math.max(base, ...rows.map((row) => row.seconds), 1e-12);
    const list = element("ol", "ranked");
    for (const row of rows) {
      const item = element("li", "ranked-row");
      const head = element("div", "ranked-head");
      const value = element("span", "ranked-value", speedup(base, row.seconds));
      value.classList.add(verdict(base, row.seconds));
      head.append(element("span", "ranked-label", row.label), value);
      const track = element("div", "bar-track slim");
      const filled = element("div", "bar-piece");
      filled.style.width = `${(100 * row.seconds) / longest}%`;
      filled.style.background = "var(--accent)";
      track.append(filled);
      const mark = element("div", "bar-mark", null, { "aria-hidden": "true" });
      mark.style.left = `${(100 * base) / longest}%`;
      track.append(mark);
      item.append(head, track, element("div", "ranked-about",
        `${seconds(row.seconds)} per step${row.bounds ? ` ${row.bounds}` : ""}${row.about ? ` · ${row.about}` : ""}`));
      list.append(item);
    }
    container.append(list);
  }

  function steps(container, { seconds: lengths, parts, rows = null, chosen = -1, onPick = null }) {
    container.replaceChildren();
    const longest = Math.max(...lengths, 1e-12);
    const list = element("div", "columns", null, { role: "group", "aria-label": "steps" });
    lengths.forEach((length, number) => {
      const column = element("button", "column", null, { type: "button", "aria-pressed": String(number === chosen) });
      column.title = `step ${number}: ${seconds(length)}`;
      column.setAttribute("aria-label", column.title);
      const fill = element("span", "column-fill");
      fill.style.height = `${(100 * length) / longest}%`;
      if (rows) {
        for (const part of parts) {
          const piece = element("span", "column-piece");
          piece.style.background = `var(--part-${part.key})`;
          piece.style.flexGrow = String(Math.max(rows[number][part.key] || 0, 0) / longest);
          fill.append(piece);
        }
      } else fill.style.background = "var(--accent)";
      column.append(fill);
      if (onPick) column.addEventListener("click", () => onPick(number));
      list.append(column);
    });
    container.append(list);
  }

  function switchTheme(button) {
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)");
    const follow = () => { root.dataset.theme = system.matches ? "dark" : "light"; };
    follow();
    system.addEventListener("change", follow);
    button.addEventListener("click", () => {
      system.removeEventListener("change", follow);
      root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    });
  }

  async function copy(button) {
    const text = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(text.textContent);
    } catch {
      // A file in the browser may not use the clipboard's interface, but may copy what is selected.
      getSelection().selectAllChildren(text);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  function copyButtons() {
    for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  }

  return { copyButtons, seconds, bytes, percent, speedup, verdict, element, legend, stacked, ranked, steps, switchTheme };
})();
