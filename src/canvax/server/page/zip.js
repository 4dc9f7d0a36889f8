// A zip file of images, stored as they are: PKWARE's APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16.

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k += 1) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});

function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

/** Little-endian numbers, each [bytes, value]. */
function record(...fields) {
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [size]) => sum + size, 0)));
  let at = 0;
  for (const [size, value] of fields) {
    if (size === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += size;
  }
  return view.buffer;
}

/** `files` has [name, a function that gives its blob]; equal names are numbered. */
export async function zipped(files) {
  const [parts, entries, used] = [[], [], new Set()];
  let offset = 0;
  for (const [wanted, read] of files) {
    const blob = await read();
    let name = wanted;
    for (let n = 2; used.has(name); n += 1) name = wanted.replace(/(\.\w+)$/, ` (${n})$1`);
    used.add(name);
    const text = new TextEncoder().encode(name);
    const crc = crc32(new Uint8Array(await blob.arrayBuffer()));
    // Version 2.0, names in UTF-8, stored, 1980-01-01.
    const shared = [[2, 20], [2, 0x0800], [2, 0], [2, 0], [2, 33], [4, crc], [4, blob.size], [4, blob.size], [2, text.length], [2, 0]];
    parts.push(record([4, 0x04034b50], ...shared), text, blob);
    entries.push(record([4, 0x02014b50], [2, 20], ...shared, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]), text);
    offset += 30 + text.length + blob.size;
  }
  const size = entries.reduce((sum, part) => sum + part.byteLength, 0);
  const end = record([4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, size], [4, offset], [2, 0]);
  return new Blob([...parts, ...entries, end], { type: "application/zip" });
}
