// Where the numbers come from: the local server, or data inside the page (a static export). Both answer the same questions; a place is "batches/12" or "evals/20".

const ARRAYS = { float32: Float32Array, float64: Float64Array, int32: Int32Array };

export function makeSource() {
  const embedded = document.getElementById("embedded");
  return embedded ? fromPage(JSON.parse(embedded.textContent)) : fromServer();
}

function fromServer() {
  const get = async (path) => {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `the server answered ${answer.status}`);
    return answer;
  };
  const json = async (path) => (await get(path)).json();
  return {
    run: () => json("api/run"),
    batch: (place) => json(`api/${place}`),
    history: (id) => json(`api/history?prompt_id=${encodeURIComponent(id)}`),
    turns: (place, group) => json(`api/${place}/prompts/${group}/turns`),
    token: (place, group, at) => json(`api/${place}/prompts/${group}/tokens/${at}`),
    column: async (place, group, name) => {
      const answer = await get(`api/${place}/prompts/${group}/columns/${encodeURIComponent(name)}`);
      return new ARRAYS[answer.headers.get("X-Dtype")](await answer.arrayBuffer());
    },
  };
}

function fromPage(data) {
  const unpacked = new Map();
  const column = async (place, group, name) => {
    const key = `${place}/${group}/${name}`;
    if (!unpacked.has(key)) {
      const packed = batchOf(place).columns[group]?.[name];
      if (!packed) throw new Error(`this page has no column ${name} of ${place}, prompt ${group}`);
      const bytes = Uint8Array.from(atob(packed[1]), (char) => char.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      unpacked.set(key, new ARRAYS[packed[0]](await new Response(stream).arrayBuffer()));
    }
    return unpacked.get(key);
  };
  const batchOf = (place) => {
    const batch = place.split("/")[1];
    if (!data.batches[batch]) throw new Error(`this page has no batch ${batch}; it has ${Object.keys(data.batches).join(", ")}`);
    return data.batches[batch];
  };
  return {
    run: async () => data.run,
    batch: async (place) => batchOf(place).info,
    history: async () => [],
    column,
    turns: async (place, group) => batchOf(place).turns[group] ?? [],
    token: async (place, group, at) => {
      const { info, words, flags } = batchOf(place);
      const out = { text: info.texts[(await column(place, group, "text"))[at]] };
      for (const { name } of info.columns) {
        const value = (await column(place, group, name))[at];
        out[name] = words[name] ? words[name][value] ?? null : Number.isNaN(value) ? null : flags.includes(name) ? value === 1 : value;
      }
      return out;
    },
  };
}
