/* A gzipped block that lies in the page as base64, as an ArrayBuffer. */
export async function unpack(base64) {
  if (!window.DecompressionStream) throw new Error("this browser cannot unpack the page's data: one of 2023 or later is needed");
  const text = atob(base64), packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
