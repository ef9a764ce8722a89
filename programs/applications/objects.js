// Objects, maps, typed arrays, regular expressions, big integers. The first argument is the number of objects.

const count = Number(args[0]);
let seed = 12345;

function random(limit) {
    seed = (Math.imul(seed, 1103515245) + 12345) & 0x7fffffff;
    return Math.floor(seed / 7) % limit;
}

let answer = 0xcbf29ce484222325n;
function note(text) {
    for (const letter of String(text))
        answer = ((answer ^ BigInt(letter.codePointAt(0))) * 0x100000001b3n) & 0xffffffffffffffffn;
}

const all = [], byName = new Map();
for (let number = 0; number < count; number++) {
    const name = `${random(1 << 24).toString(36)}-${number}-${"xy".repeat(random(20))}`;
    const object = { name, number, weight: random(100000), neighbors: [] };
    all.push(object);
    byName.set(name, object);
}
for (const object of all)
    for (let at = 0; at < 3; at++)
        object.neighbors.push(all[random(count)]);
const bytes = new Uint32Array(count * 16);
for (let at = 0; at < bytes.length; at++)
    bytes[at] = random(1 << 30);
bytes.sort();
for (let at = 0; at < bytes.length; at += 1024)
    note(bytes[at]);
all.sort((a, b) => a.weight - b.weight || a.number - b.number);
for (let at = 0; at < count; at += 16)
    note(all[at].name);
let walker = all[0];
for (let step = 0; step < 2000; step++) {
    walker = walker.neighbors[step % 3];
    if (step % 20 === 0)
        note(walker.name.replace(/[a-f0-9]+/, "#"));
}
for (const [name, object] of byName)
    if (object.weight % 3 === 0)
        byName.delete(name);
let weight = 0n;
for (const object of byName.values())
    weight = weight * 3n % 1000000007n + BigInt(object.weight);
note(`${byName.size} ${weight}`);
note(JSON.stringify(all.slice(0, 100).map(({ name, weight }) => ({ name, weight }))));
print("answer " + answer.toString(16));
