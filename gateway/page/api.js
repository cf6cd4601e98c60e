// The gateway's API: JSON, streams, and errors in words. Paths are relative to the page, wherever a proxy has put it.

const MAX_EVENT_CHARS = 4 << 20;

/** What went wrong, in words for the reader. `param` names the field at fault, where there is one. */
export class ApiError extends Error {
  constructor(message, { param = null } = {}) {
    super(message);
    this.param = param;
  }
}

/** GET `path` as `{status, body}`. Throws ApiError where nothing, or no JSON, comes back. */
export async function getJson(path, { key = "" } = {}) {
  const response = await reach(path, { headers: headers(key) });
  try {
    return { status: response.status, body: await response.json() };
  } catch {
    throw new ApiError(`The gateway answered /${path} with something that is not JSON (${response.status}).`);
  }
}

/**
 * The chunks of a streamed chat answer, as they come.
 *
 * Abort `signal` to stop: the gateway then frees what the answer held. Throws ApiError when the gateway refuses, or
 * the answer breaks off.
 */
export async function* streamChat(body, { key = "", signal } = {}) {
  const response = await reach("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new ApiError("The answer broke off: the stream holds something that is not JSON.");
    }
    if (chunk.error) throw new ApiError(`The answer broke off: ${chunk.error.message}`, chunk.error);
    yield chunk;
  }
  throw new ApiError("The answer broke off before its end. The gateway may have been stopped.");
}

/** The `data` of a stream's server-sent events. Comments are left out; bytes may be cut anywhere. */
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection to the gateway broke in the middle of the answer.");
      });
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      if (rest.length > MAX_EVENT_CHARS) throw new ApiError("The answer broke off: an event of the stream has no end.");
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function reach(path, options) {
  try {
    return await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway cannot be reached. Is it still running?");
  }
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's own page, perhaps: the status has to do
  }
  const said = error.message ? sentence(error.message) : `The gateway answered ${response.status}.`;
  const wait = response.headers.get("retry-after");
  const again = wait ? ` Try again in ${wait} s.` : "";
  const lead = {
    401: "The gateway wants an API key; there is a field for it in the settings. ",
    403: "This API key does not allow that. ",
    429: "The gateway is busy. ",
    503: "The model cannot be reached. ",
    504: "The answer took too long. ",
  };
  return new ApiError((lead[response.status] ?? "") + said + again, error);
}

function sentence(text) {
  const trimmed = text.trim();
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? "" : ".");
}
