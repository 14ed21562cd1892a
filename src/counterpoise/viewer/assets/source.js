// Where the numbers come from: the local server, or data inside the page (a static export). Both answer the same four questions.

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
    batch: (batch) => json(`api/batches/${batch}`),
    token: (batch, group, at) => json(`api/batches/${batch}/prompts/${group}/tokens/${at}`),
    column: async (batch, group, name) => {
      const answer = await get(`api/batches/${batch}/prompts/${group}/columns/${encodeURIComponent(name)}`);
      return new ARRAYS[answer.headers.get("X-Dtype")](await answer.arrayBuffer());
    },
  };
}

function fromPage(data) {
  const unpacked = new Map();
  const column = async (batch, group, name) => {
    const key = `${batch}/${group}/${name}`;
    if (!unpacked.has(key)) {
      const packed = data.batches[batch]?.columns[group]?.[name];
      if (!packed) throw new Error(`this page has no column ${name} of batch ${batch}, prompt ${group}`);
      const bytes = Uint8Array.from(atob(packed[1]), (char) => char.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      unpacked.set(key, new ARRAYS[packed[0]](await new Response(stream).arrayBuffer()));
    }
    return unpacked.get(key);
  };
  const batchOf = (batch) => {
    if (!data.batches[batch]) throw new Error(`this page has no batch ${batch}; it has ${Object.keys(data.batches).join(", ")}`);
    return data.batches[batch];
  };
  return {
    run: async () => data.run,
    batch: async (batch) => batchOf(batch).info,
    column,
    token: async (batch, group, at) => {
      const { info, words, flags } = batchOf(batch);
      const out = { text: info.texts[(await column(batch, group, "text"))[at]] };
      for (const { name } of info.columns) {
        const value = (await column(batch, group, name))[at];
        out[name] = words[name] ? words[name][value] ?? null : Number.isNaN(value) ? null : flags.includes(name) ? value === 1 : value;
      }
      return out;
    },
  };
}
