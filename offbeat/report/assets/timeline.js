/* A packed scene (offbeat/report/scene.py) → an aligned timeline of all ranks on a canvas that zooms and pans.
   Needs charts.js before it and style.css; no framework.

   const scene = await Timeline.decode(packed);        // ArrayBuffer, Uint8Array or base64 text, gzipped
   const view = Timeline.create(container, scene);     // fills the container; draws at once
   view.setScene(scene, keepWindow)                    // another scene in the same place
   view.show(start, end)   view.fit()                  // seconds since the scene's zero
   view.zoom(factor, at)   view.pan(share)             // factor 0.5 shows half as much; share of what is visible
   view.setCritical(on)                                // highlights the critical path
   view.onWindow = (start, end) => …                   // after each change of what is visible
   view.stats → {rectangles, milliseconds, resolution} // of the last drawing
   scene.seconds, scene.steps [[start, end]], scene.rows [{label, group, lane, kind, rank}], scene.spans

   Of each zoom level at most MOST_RECTANGLES are drawn: spans shorter than about a pixel are merged by the runs that
   Python has found. Keys: + − zoom, ← → pan, ↑ ↓ choose a row, . , next and previous span, Enter zooms to it, F fits,
   C toggles the critical path. */
"use strict";

const Timeline = (() => {
  const MOST_RECTANGLES = 30000;
  const GUTTER = 148, NARROW_GUTTER = 100, NARROW = 560, AXIS = 26, LANE = 18, SUBLANE = 11, GROUP = 24, GAP = 3, OVERVIEW = 40;

  async function decode(packed) {
    const bytes = typeof packed === "string" ? fromBase64(packed) : new Uint8Array(packed.buffer || packed);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const content = new Uint8Array(await new Response(stream).arrayBuffer());
    const length = new DataView(content.buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(content.subarray(4, 4 + length)));
    const columns = {};
    let offset = 4 + length;
    for (const [name, width, count] of header.columns) {
      columns[name] = joined(content.subarray(offset, offset + width * count), width, count);
      offset += width * count;
    }
    return makeScene(header, columns);
  }

  function fromBase64(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
    return bytes;
  }

  // A column is stored as planes: all lowest bytes, then all second bytes and so on, which compresses far better.
  function joined(planes, width, count) {
    if (width === 1) return planes;
    const word = (first) => {
      const out = new Uint32Array(count);
      for (let plane = 0; plane < 4; plane += 1) {
        const base = (first + plane) * count, shift = 8 * plane;
        for (let i = 0; i < count; i += 1) out[i] |= planes[base + i] << shift;
      }
      return out;
    };
    const low = word(0);
    if (width === 4) return low;
    const high = word(4), out = new Float64Array(count);
    for (let i = 0; i < count; i += 1) out[i] = high[i] * 4294967296 + low[i];
    return out;
  }

  function makeScene(header, columns) {
    const count = columns.start.length, tick = header.tick;
    const offsets = new Uint32Array(columns.rows.length + 1);
    columns.rows.forEach((size, row) => { offsets[row + 1] = offsets[row] + size; });
    const start = new Float64Array(count), end = new Float64Array(count), busy = new Float64Array(count);
    for (let row = 0; row < columns.rows.length; row += 1) {
      let at = 0;
      for (let i = offsets[row]; i < offsets[row + 1]; i += 1) {
        at += columns.start[i];
        start[i] = at * tick;
        end[i] = (at + columns.length[i]) * tick;
        busy[i] = (columns.length[i] - columns.idle[i]) * tick;
      }
    }
    const spans = { offsets, start, end, busy, kind: columns.kind, name: columns.name, count: columns.count,
                    bytes: columns.bytes, queue: columns.queue, resolution: 0 };
    spans.reach = reachOf(spans);
    const critical = pathsOf(columns, tick);
    const rows = header.rows.map(([label, group, lane, kind, rank]) => ({ label, group, lane, kind, rank }));
    const levels = header.resolutions.map((resolution, number) => ({ resolution, runs: columns[`level${number}`] }));
    return { seconds: header.seconds, steps: header.steps, names: header.names, kinds: header.kinds, total: header.total,
             source: header.source, tick, rows, spans, levels, critical, made: new Map() };
  }

  // The critical paths as columns, and of each step which part of them is its own.
  function pathsOf(columns, tick) {
    const { critical_row: row, critical_step: step } = columns;
    const start = Float64Array.from(columns.critical_start, (at) => at * tick);
    const end = start.map((from, i) => from + columns.critical_length[i] * tick);
    const offsets = [0];
    for (let i = 1; i < row.length; i += 1) if (step[i] !== step[i - 1]) offsets.push(i);
    if (row.length) offsets.push(row.length);
    return { row, start, end, reach: reachOf({ offsets, end }), offsets };
  }

  // Greatest end up to each block: finds the first visible block even where long ones enclose short ones.
  function reachOf(blocks) {
    const reach = new Float64Array(blocks.end.length);
    for (let row = 0; row + 1 < blocks.offsets.length; row += 1) {
      let greatest = -Infinity;
      for (let i = blocks.offsets[row]; i < blocks.offsets[row + 1]; i += 1) {
        if (blocks.end[i] > greatest) greatest = blocks.end[i];
        reach[i] = greatest;
      }
    }
    return reach;
  }

  // The blocks of a level, made when first drawn; level -1 are the spans themselves.
  function blocksOf(scene, level) {
    if (level < 0) return scene.spans;
    if (scene.made.has(level)) return scene.made.get(level);
    const { runs, resolution } = scene.levels[level], spans = scene.spans, count = runs.length;
    const made = { offsets: new Uint32Array(spans.offsets.length), start: new Float64Array(count), resolution,
                   end: new Float64Array(count), busy: new Float64Array(count), kind: new Uint8Array(count),
                   name: new Uint32Array(count), count: new Uint32Array(count), bytes: new Float64Array(count) };
    const shares = new Float64Array(scene.kinds.length);
    let i = 0, row = 0;
    for (let block = 0; block < count; block += 1) {
      while (i >= spans.offsets[row + 1]) { row += 1; made.offsets[row] = block; }
      const stop = i + runs[block];
      let latest = spans.end[i], longest = i;
      made.start[block] = spans.start[i];
      shares.fill(0);
      for (; i < stop; i += 1) {
        if (spans.end[i] > latest) latest = spans.end[i];
        if (spans.busy[i] > spans.busy[longest]) longest = i;
        shares[spans.kind[i]] += spans.busy[i];
        made.busy[block] += spans.busy[i];
        made.count[block] += spans.count[i];
        made.bytes[block] += spans.bytes[i];
      }
      made.end[block] = latest;
      made.name[block] = spans.name[longest];
      let most = spans.kind[longest];
      for (let kind = 0; kind < shares.length; kind += 1) if (shares[kind] > shares[most]) most = kind;
      made.kind[block] = most;
    }
    while (row + 1 < made.offsets.length) { row += 1; made.offsets[row] = count; }
    made.reach = reachOf(made);
    scene.made.set(level, made);
    return made;
  }

  // First position in [low, high) whose value exceeds `limit`; the values must not decrease.
  function firstAbove(values, limit, low, high) {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (values[middle] > limit) high = middle; else low = middle + 1;
    }
    return low;
  }

  class View {
    constructor(container, scene) {
      this.container = container;
      this.onWindow = null;
      this.stats = { rectangles: 0, milliseconds: 0, resolution: 0 };
      this.critical = true;
      this.selected = null;
      this.hovered = null;
      this.row = 0;
      this.width = 50;
      this.gutter = GUTTER;
      this.build();
      this.setScene(scene);
      this.listen();
    }

    build() {
      const make = Charts.element;
      this.container.classList.add("timeline");
      this.overview = make("canvas", "timeline-overview", null, { "aria-hidden": "true" });
      this.scroller = make("div", "timeline-scroll", null, {
        tabindex: "0", role: "application", "aria-roledescription": "timeline",
        "aria-label": "Timeline of all ranks. Plus and minus zoom, arrows pan and choose a row, full stop and comma go "
          + "from span to span, F fits, C toggles the critical path.",
      });
      this.canvas = make("canvas", "timeline-canvas", null, { "aria-hidden": "true" });
      this.spacer = make("div", "timeline-spacer");
      this.tooltip = make("div", "timeline-tooltip", null, { role: "tooltip" });
      this.tooltip.hidden = true;
      this.status = make("div", "timeline-status", "", { "aria-live": "polite" });
      this.scroller.append(this.canvas, this.spacer);
      this.container.replaceChildren(this.overview, this.scroller, this.tooltip, this.status);
    }

    setScene(scene, keepWindow = false) {
      this.scene = scene;
      this.selected = this.hovered = null;
      this.row = 0;
      this.layout();
      this.readColours();
      if (keepWindow && this.start !== undefined) this.show(this.start, this.end);
      else this.fit();
    }

    layout() {
      let y = AXIS, group = null;
      this.headers = [];
      this.places = this.scene.rows.map((row, number) => {
        if (row.group !== group) {
          group = row.group;
          if (group) { this.headers.push({ y, label: group }); y += GROUP; }
        }
        const height = row.lane ? SUBLANE : LANE, place = { y, height };
        const next = this.scene.rows[number + 1];
        y += height + (next && next.lane ? 1 : GAP) + (next && next.rank !== row.rank ? GAP : 0);
        return place;
      });
      this.height = y + 4;
      this.spacer.style.height = `${this.height}px`;
      const shown = Math.min(this.height, 640);
      this.scroller.style.height = `${shown}px`;
      this.spacer.style.marginTop = `${-shown}px`;
      this.overviewBins = null;
    }

    readColours() {
      const style = getComputedStyle(document.documentElement);
      const variable = (name) => style.getPropertyValue(name).trim();
      this.colours = {
        kinds: this.scene.kinds.map((kind) => variable(`--kind-${kind}`) || "#888"),
        ink: variable("--ink"), muted: variable("--muted"), line: variable("--line"), surface: variable("--surface"),
        band: variable("--band"), critical: variable("--critical"), accent: variable("--accent"),
        onSpan: variable("--on-span"),
      };
    }

    listen() {
      new ResizeObserver(() => { this.overviewBins = null; this.draw(); }).observe(this.scroller);
      this.scroller.addEventListener("scroll", () => this.draw());
      this.scroller.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
      this.scroller.addEventListener("keydown", (event) => this.onKey(event));
      this.scroller.addEventListener("pointerdown", (event) => this.onDown(event));
      this.scroller.addEventListener("pointermove", (event) => this.onMove(event));
      this.scroller.addEventListener("pointerleave", () => this.hover(null));
      this.scroller.addEventListener("dblclick", (event) => {
        const found = this.hit(event);
        if (found) this.zoomTo(found);
      });
      this.overview.addEventListener("pointerdown", (event) => this.onOverview(event));
      this.overview.addEventListener("pointermove", (event) => { if (event.buttons) this.onOverview(event); });
      new MutationObserver(() => { this.readColours(); this.draw(); })
        .observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    }

    fit() { this.show(0, this.scene.seconds); }

    show(start, end) {
      const whole = this.scene.seconds, least = Math.min(whole, 20 * this.scene.tick);
      const width = Math.min(Math.max(end - start, least), whole);
      const middle = (start + end) / 2;
      this.start = Math.min(Math.max(middle - width / 2, 0), whole - width);
      this.end = this.start + width;
      this.draw();
      if (this.onWindow) this.onWindow(this.start, this.end);
    }

    zoom(factor, at = (this.start + this.end) / 2) {
      const width = (this.end - this.start) * factor, share = (at - this.start) / (this.end - this.start || 1);
      this.show(at - share * width, at + (1 - share) * width);
    }

    pan(share) {
      const by = share * (this.end - this.start);
      this.show(this.start + by, this.end + by);
    }

    zoomTo(found) {
      const length = Math.max(found.end - found.start, this.scene.tick);
      this.show(found.start - length, found.end + length);
    }

    setCritical(on) { this.critical = on; this.draw(); }

    toX(time) { return this.gutter + ((time - this.start) / (this.end - this.start || 1)) * this.width; }
    toTime(x) { return this.start + ((x - this.gutter) / this.width) * (this.end - this.start); }

    visibleRows() {
      const top = this.scroller.scrollTop + AXIS, bottom = this.scroller.scrollTop + this.scroller.clientHeight;
      const rows = [];
      this.places.forEach((place, row) => { if (place.y + place.height >= top && place.y <= bottom) rows.push(row); });
      return rows;
    }

    // The coarsest level whose blocks are about a pixel, or coarser if that would still be too many rectangles.
    chooseLevel(rows) {
      const perPixel = (this.end - this.start) / this.width, levels = this.scene.levels;
      let level = -1;
      while (level + 1 < levels.length && levels[level + 1].resolution <= 1.5 * perPixel) level += 1;
      while (level + 1 < levels.length && this.countVisible(rows, level) > MOST_RECTANGLES) level += 1;
      return level;
    }

    range(blocks, row) {
      const low = blocks.offsets[row], high = blocks.offsets[row + 1];
      return [firstAbove(blocks.reach, this.start, low, high), firstAbove(blocks.start, this.end, low, high)];
    }

    countVisible(rows, level) {
      const blocks = blocksOf(this.scene, level);
      return rows.reduce((sum, row) => { const [from, to] = this.range(blocks, row); return sum + to - from; }, 0);
    }

    draw() {
      // Read once: asking an element for its size a hundred thousand times takes longer than drawing.
      this.gutter = this.scroller.clientWidth < NARROW ? NARROW_GUTTER : GUTTER;
      this.width = Math.max(this.scroller.clientWidth - this.gutter, 50);
      const begun = performance.now(), context = prepare(this.canvas, this.scroller.clientWidth, this.scroller.clientHeight);
      if (!context) return;
      const rows = this.visibleRows(), level = this.chooseLevel(rows), blocks = blocksOf(this.scene, level);
      this.level = level;
      this.drawBands(context);
      const count = this.drawBlocks(context, blocks, rows);
      if (this.critical) this.drawCritical(context);
      this.drawMarked(context);
      this.drawLabels(context, rows);
      this.drawAxis(context);
      this.drawOverview();
      this.stats = { rectangles: count, milliseconds: performance.now() - begun, resolution: blocks.resolution };
      this.container.dataset.rectangles = String(count);
    }

    drawBands(context) {
      context.fillStyle = this.colours.surface;
      context.fillRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
      this.scene.steps.forEach(([start, end], number) => {
        if (end < this.start || start > this.end || number % 2) return;
        const x = Math.max(this.toX(start), this.gutter);
        context.fillStyle = this.colours.band;
        context.fillRect(x, AXIS, Math.min(this.toX(end), this.gutter + this.width) - x, this.canvas.clientHeight);
      });
    }

    drawBlocks(context, blocks, rows) {
      const scroll = this.scroller.scrollTop, scale = this.width / (this.end - this.start || 1);
      const right = this.gutter + this.width, byKind = this.scene.kinds.map(() => []), labels = [];
      let count = 0;
      for (const row of rows) {
        const [from, to] = this.range(blocks, row), { y, height } = this.places[row];
        for (let i = from; i < to; i += 1) {
          const x = Math.max(this.gutter + (blocks.start[i] - this.start) * scale, this.gutter);
          const x2 = Math.min(this.gutter + (blocks.end[i] - this.start) * scale, right);
          // Half a pixel of gap keeps neighbours apart once they are wide enough to have a border.
          const width = x2 - x > 4 ? x2 - x - 0.5 : Math.max(x2 - x, 0.6);
          const dense = blocks.count[i] > 1 ? blocks.busy[i] / (blocks.end[i] - blocks.start[i] || 1) : 1;
          byKind[blocks.kind[i]].push(x, y - scroll, width, height, dense);
          if (width > 44 && height >= LANE && blocks.count[i] === 1) labels.push([blocks.name[i], x, y - scroll, width]);
          count += 1;
        }
      }
      byKind.forEach((found, kind) => {
        context.fillStyle = this.colours.kinds[kind];
        for (let i = 0; i < found.length; i += 5) {
          context.globalAlpha = found[i + 4] >= 1 ? 1 : 0.35 + 0.65 * Math.max(found[i + 4], 0);
          context.fillRect(found[i], found[i + 1], found[i + 2], found[i + 3]);
        }
      });
      context.globalAlpha = 1;
      this.drawNames(context, labels);
      return count;
    }

    drawNames(context, labels) {
      context.font = "11px ui-sans-serif, system-ui, sans-serif";
      context.fillStyle = this.colours.onSpan;
      context.textBaseline = "middle";
      for (const [name, x, y, width] of labels) {
        const room = Math.floor((width - 10) / 6.1), text = this.scene.names[name];
        context.fillText(text.length > room ? `${text.slice(0, Math.max(room - 1, 1))}…` : text, x + 5, y + LANE / 2 + 0.5);
      }
    }

    drawCritical(context) {
      const scroll = this.scroller.scrollTop;
      context.save();
      context.beginPath();
      context.rect(this.gutter, AXIS, this.width, this.canvas.clientHeight);
      context.clip();
      context.strokeStyle = context.fillStyle = this.colours.critical;
      context.lineWidth = 2;
      const paths = this.scene.critical, joints = new Path2D();
      const drawn = new Float64Array(this.places.length).fill(-Infinity);
      let lastJoint = -Infinity;
      for (let path = 0; path + 1 < paths.offsets.length; path += 1) {
        const [from, to] = this.range(paths, path);
        for (let i = from; i < to; i += 1) {
          const row = paths.row[i], { y, height } = this.places[row], x = this.toX(paths.start[i]), x2 = this.toX(paths.end[i]);
          // What would only be drawn over the same pixel again is left out: a path may have a hundred thousand links.
          if (i > from && paths.row[i - 1] !== row && x > lastJoint + 1) {
            const above = this.places[paths.row[i - 1]], down = y > above.y;
            joints.moveTo(Math.min(this.toX(paths.end[i - 1]), x), (down ? above.y + above.height : above.y) - scroll);
            joints.lineTo(x, (down ? y : y + height) - scroll);
            lastJoint = x;
          }
          if (x2 < drawn[row] + 0.5) continue;
          drawn[row] = x2;
          if (x2 - x < 3) context.fillRect(x, y - scroll - 1, Math.max(x2 - x, 1), height + 2);
          else context.strokeRect(x + 1, y - scroll, x2 - x - 2, height);
        }
      }
      context.lineWidth = 1.25;
      context.setLineDash([3, 2]);
      context.stroke(joints);
      context.restore();
    }

    drawMarked(context) {
      for (const [found, colour] of [[this.hovered, this.colours.ink], [this.selected, this.colours.accent]]) {
        if (!found) continue;
        const { y, height } = this.places[found.row], x = Math.max(this.toX(found.start), this.gutter);
        context.strokeStyle = colour;
        context.lineWidth = 1.5;
        context.strokeRect(x - 0.5, y - this.scroller.scrollTop - 1, Math.max(Math.min(this.toX(found.end), this.gutter + this.width) - x, 1) + 1, height + 2);
      }
    }

    drawLabels(context, rows) {
      const scroll = this.scroller.scrollTop, height = this.canvas.clientHeight;
      context.fillStyle = this.colours.surface;
      context.fillRect(0, 0, this.gutter - 1, height);
      context.textBaseline = "middle";
      for (const { y, label } of this.headers) {
        context.font = "600 11px ui-sans-serif, system-ui, sans-serif";
        context.fillStyle = this.colours.muted;
        context.fillText(clipped(label, 22), 10, y - scroll + GROUP / 2 + 2, this.gutter - 14);
      }
      context.font = "12px ui-sans-serif, system-ui, sans-serif";
      for (const row of rows) {
        const { label, lane } = this.scene.rows[row], place = this.places[row];
        if (row === this.row && document.activeElement === this.scroller) {
          context.fillStyle = this.colours.accent;
          context.fillRect(2, place.y - scroll, 3, place.height);
        }
        context.fillStyle = this.colours.ink;
        if (!lane) context.fillText(clipped(label, 20), 10, place.y - scroll + place.height / 2, this.gutter - 14);
      }
      context.fillStyle = this.colours.line;
      context.fillRect(this.gutter - 1, 0, 1, height);
    }

    drawAxis(context) {
      context.fillStyle = this.colours.surface;
      context.fillRect(0, 0, this.canvas.clientWidth, AXIS - 2);
      context.fillStyle = this.colours.line;
      context.fillRect(0, AXIS - 2, this.canvas.clientWidth, 1);
      context.font = "11px ui-sans-serif, system-ui, sans-serif";
      context.textBaseline = "middle";
      const unit = tickWidth((this.end - this.start) / Math.max(this.width / 110, 1));
      for (let at = Math.ceil(this.start / unit) * unit; at <= this.end; at += unit) {
        const x = this.toX(at);
        context.fillStyle = this.colours.line;
        context.fillRect(x, AXIS - 8, 1, 6);
        context.fillStyle = this.colours.muted;
        if (x < this.gutter + this.width - 30) context.fillText(Charts.seconds(Math.round(at / unit) * unit), x + 4, AXIS / 2 - 2);
      }
    }

    onOverview(event) {
      const box = this.overview.getBoundingClientRect();
      const at = ((event.clientX - box.left - this.gutter) / this.width) * this.scene.seconds, half = (this.end - this.start) / 2;
      this.show(at - half, at + half);
    }

    // How busy ranks and links are over the whole trace, and which part of it is visible below.
    drawOverview() {
      const context = prepare(this.overview, this.scroller.clientWidth, OVERVIEW);
      if (!context) return;
      if (!this.overviewBins) this.overviewBins = this.measureOverview();
      const { bins, compute, network } = this.overviewBins, half = OVERVIEW / 2 - 3;
      const place = (kind) => this.colours.kinds[Math.max(this.scene.kinds.indexOf(kind), 0)];
      context.fillStyle = this.colours.surface;
      context.fillRect(0, 0, this.overview.clientWidth, OVERVIEW);
      for (const [values, colour, bottom] of [[compute, place("forward"), half + 1], [network, place("communication"), OVERVIEW - 3]]) {
        context.fillStyle = colour;
        for (let bin = 0; bin < bins; bin += 1) {
          const height = half * Math.min(values[bin], 1);
          if (height > 0.2) context.fillRect(this.gutter + bin, bottom - height, 1, height);
        }
      }
      context.fillStyle = this.colours.muted;
      context.font = "11px ui-sans-serif, system-ui, sans-serif";
      context.textBaseline = "middle";
      context.fillText("ranks busy", 10, half / 2 + 1);
      context.fillText("links busy", 10, OVERVIEW - half / 2 - 2);
      const x = this.gutter + (this.start / this.scene.seconds) * this.width || this.gutter;
      const width = Math.max(((this.end - this.start) / this.scene.seconds) * this.width || 0, 3);
      context.fillStyle = this.colours.surface;
      context.globalAlpha = 0.72;
      context.fillRect(this.gutter, 0, x - this.gutter, OVERVIEW);
      context.fillRect(x + width, 0, this.gutter + this.width - x - width, OVERVIEW);
      context.globalAlpha = 1;
      context.strokeStyle = this.colours.accent;
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, 0.75, Math.max(width - 1.5, 1), OVERVIEW - 1.5);
    }

    measureOverview() {
      const bins = Math.floor(this.width), scale = bins / (this.scene.seconds || 1);
      const compute = new Float64Array(bins), network = new Float64Array(bins);
      let level = -1;
      while (level + 1 < this.scene.levels.length && this.scene.levels[level + 1].resolution * scale <= 1.5) level += 1;
      const blocks = blocksOf(this.scene, level), wait = this.scene.kinds.indexOf("wait");
      // A rank or its link is busy while any of its tracks and their lanes is.
      const ranks = new Map(), links = new Map(), own = new Float64Array(bins);
      this.scene.rows.forEach((row, number) => {
        const into = row.kind === "network" ? links : ranks;
        if (!into.has(row.rank)) into.set(row.rank, []);
        into.get(row.rank).push(number);
      });
      for (const [owners, sum] of [[ranks, compute], [links, network]]) {
        for (const rows of owners.values()) {
          own.fill(0);
          for (const row of rows) {
            for (let i = blocks.offsets[row]; i < blocks.offsets[row + 1]; i += 1) {
              if (blocks.kind[i] === wait) continue;
              const from = blocks.start[i] * scale, to = Math.max(blocks.end[i] * scale, from + 1e-9);
              const dense = Math.min(blocks.busy[i] / (blocks.end[i] - blocks.start[i] || 1), 1);
              for (let bin = Math.floor(from); bin < Math.min(to, bins); bin += 1)
                own[bin] += dense * (Math.min(to, bin + 1) - Math.max(from, bin));
            }
          }
          for (let bin = 0; bin < bins; bin += 1) sum[bin] += Math.min(own[bin], 1) / owners.size;
        }
      }
      return { bins, compute, network };
    }

    hit(event) {
      const box = this.scroller.getBoundingClientRect(), x = event.clientX - box.left;
      const y = event.clientY - box.top + this.scroller.scrollTop;
      if (x < this.gutter || event.clientY - box.top < AXIS) return null;
      const row = this.places.findIndex((place) => y >= place.y - 1 && y <= place.y + place.height + 1);
      return row < 0 ? null : this.found(row, this.toTime(x), 2 * (this.end - this.start) / this.width);
    }

    // The block of a row under a moment, or the nearest within `slack` seconds.
    found(row, time, slack) {
      const blocks = blocksOf(this.scene, this.level), low = blocks.offsets[row], high = blocks.offsets[row + 1];
      const after = firstAbove(blocks.start, time + slack, low, high);
      let nearest = -1, distance = slack;
      for (let i = after - 1; i >= Math.max(low, after - 64) && blocks.reach[i] >= time - slack; i -= 1) {
        const away = Math.max(blocks.start[i] - time, time - blocks.end[i], 0);
        if (away < distance || (nearest < 0 && away <= distance)) { nearest = i; distance = away; }
        if (!away) break;
      }
      return nearest < 0 ? null : this.described(blocks, row, nearest);
    }

    described(blocks, row, i) {
      return { row, index: i, start: blocks.start[i], end: blocks.end[i], busy: blocks.busy[i], count: blocks.count[i],
               bytes: blocks.bytes[i], kind: this.scene.kinds[blocks.kind[i]], name: this.scene.names[blocks.name[i]],
               queue: blocks.queue ? blocks.queue[i] : 0 };
    }

    lines(found) {
      const alone = found.count === 1, facts = [];
      facts.push(["where", this.scene.rows[found.row].label]);
      facts.push([alone ? "duration" : "extent", Charts.seconds(found.end - found.start)]);
      if (!alone) facts.push(["busy", Charts.seconds(found.busy)]);
      if (found.bytes > 0) facts.push(["size", Charts.bytes(found.bytes)]);
      facts.push(["kind", alone ? found.kind : `mostly ${found.kind}`]);
      facts.push(["begins", `${Charts.seconds(found.start)} after the first span`]);
      if (alone && found.queue > 1) facts.push(["waited before", Charts.seconds((found.queue - 1) * this.scene.tick)]);
      if (!alone) facts.push(["longest", found.name]);
      return { title: alone ? found.name : `${found.count} spans`, facts };
    }

    hover(found, event = null) {
      if (!found && !this.hovered) return;
      const same = this.hovered && found && this.hovered.row === found.row && this.hovered.start === found.start;
      this.hovered = found;
      this.tooltip.hidden = !found;
      if (found && event) {
        if (!same) this.fillTooltip(found);
        const box = this.container.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
        this.tooltip.style.left = `${Math.max(Math.min(x + 14, box.width - this.tooltip.offsetWidth - 8), 4)}px`;
        this.tooltip.style.top = `${y + 18}px`;
      }
      if (!same) this.draw();
    }

    fillTooltip(found) {
      const { title, facts } = this.lines(found), make = Charts.element, list = make("dl");
      for (const [name, value] of facts) list.append(make("dt", "", name), make("dd", "", value));
      this.tooltip.replaceChildren(make("strong", "", title), list);
    }

    select(found) {
      this.selected = found;
      if (found) {
        const { title, facts } = this.lines(found);
        this.row = found.row;
        this.status.textContent = `${title}: ${facts.map(([name, value]) => `${name} ${value}`).join(", ")}`;
      } else this.status.textContent = "";
      this.draw();
    }

    onWheel(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) {
        event.preventDefault();
        const x = event.clientX - this.scroller.getBoundingClientRect().left;
        this.zoom(Math.exp(Math.min(Math.max(event.deltaY, -60), 60) * 0.01), this.toTime(Math.max(x, this.gutter)));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        this.pan((event.deltaX || event.deltaY) / this.width);
      }
    }

    onDown(event) {
      if (event.button !== 0 || event.offsetX > this.scroller.clientWidth) return;
      this.drag = { x: event.clientX, start: this.start, end: this.end, moved: false };
      this.scroller.setPointerCapture(event.pointerId);
      const released = () => {
        if (this.drag && !this.drag.moved) this.select(this.hit(event));
        this.drag = null;
      };
      this.scroller.addEventListener("pointerup", released, { once: true });
    }

    onMove(event) {
      if (!this.drag) { this.hover(this.hit(event), event); return; }
      const by = event.clientX - this.drag.x;
      if (Math.abs(by) > 3) this.drag.moved = true;
      if (!this.drag.moved) return;
      this.hover(null);
      const seconds = (-by / this.width) * (this.drag.end - this.drag.start);
      this.show(this.drag.start + seconds, this.drag.end + seconds);
    }

    onKey(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const actions = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), _: () => this.zoom(2),
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), Home: () => this.fit(),
        f: () => this.fit(), F: () => this.fit(), ".": () => this.step(1), ",": () => this.step(-1),
        c: () => this.toggleCritical(), C: () => this.toggleCritical(),
        ArrowUp: () => this.chooseRow(-1), ArrowDown: () => this.chooseRow(1),
        Enter: () => { if (this.selected) this.zoomTo(this.selected); }, Escape: () => this.select(null),
      };
      if (!(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    }

    toggleCritical() {
      this.setCritical(!this.critical);
      this.container.dispatchEvent(new CustomEvent("critical", { detail: this.critical }));
    }

    chooseRow(by) {
      this.row = Math.min(Math.max(this.row + by, 0), this.scene.rows.length - 1);
      const { y, height } = this.places[this.row];
      if (y - AXIS < this.scroller.scrollTop) this.scroller.scrollTop = y - AXIS - GROUP;
      else if (y + height > this.scroller.scrollTop + this.scroller.clientHeight)
        this.scroller.scrollTop = y + height - this.scroller.clientHeight + 8;
      this.status.textContent = this.scene.rows[this.row].label;
      this.draw();
    }

    step(by) {
      const blocks = blocksOf(this.scene, this.level), low = blocks.offsets[this.row], high = blocks.offsets[this.row + 1];
      if (low === high) return;
      const here = this.selected && this.selected.row === this.row;
      let next = here ? firstAbove(blocks.start, this.selected.start, low, high) - 1 + by
                      : firstAbove(blocks.start, this.start, low, high);
      next = Math.min(Math.max(next, low), high - 1);
      const found = this.described(blocks, this.row, next);
      if (found.start < this.start || found.start > this.end) {
        const half = (this.end - this.start) / 2;
        this.show(found.start - half, found.start + half);
      }
      this.select(found);
    }
  }

  // Sizes a canvas in device pixels; null where it is not visible.
  function prepare(canvas, width, height) {
    if (!width || !height) return null;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return context;
  }

  function tickWidth(least) {
    const power = 10 ** Math.floor(Math.log10(least || 1e-9));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.9999);
  }

  const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  return { decode, create: (container, scene) => new View(container, scene), MOST_RECTANGLES };
})();
