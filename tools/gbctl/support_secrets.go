package main

import (
	"bytes"
	"encoding/base64"
	"regexp"
	"unicode"
)

const (
	// hidden replaces a secret, as in everything that nodes redact.
	hidden = "(secret)"

	// maxPEM limits how far the end of a private key is searched: an RSA key with 16,384
	// bits, with a long log prefix on each line, is shorter.
	maxPEM = 64 << 10

	// minEncoded is the shortest run of base64 that is decoded: a line of a wrapped key
	// is longer, and most names and paths are shorter.
	minEncoded = 40

	// maxWrapped is the longest line of mail (RFC 5322, 2.1.1). Base64 with a longer line
	// isn't wrapped: the word on the next line isn't the end of it.
	maxWrapped = 998

	// encodings is the number of base64 layers that are decoded: a kubeconfig in the
	// manifest of a Secret has two.
	encodings = 3
)

// Kinds of secrets, as the summary of a bundle lists them.
const (
	secretKey       = "private key"
	secretEncoded   = "encoded secret"
	secretBootstrap = "bootstrap token"
	secretBearer    = "bearer token"
	secretPassword  = "password"
)

// pattern is a kind of secret that is recognised by the text before it. The group of the
// expression is the secret.
type pattern struct {
	kind string
	// literal, in lower case, is a text at which match is tried: regular expressions are
	// too slow for whole logs.
	literal string
	match   *regexp.Regexp
	also    func(secret []byte) bool // nil: always
}

// Quotes may be escaped if a program logs the output of another one.
var patterns = []pattern{
	{secretEncoded, "client-key-data", regexp.MustCompile(`^.{15}\\?["']?[ \t]*:[ \t]*\\?["']?([A-Za-z0-9+/_-]{8,}={0,2})`), nil},
	{secretPassword, "://", regexp.MustCompile(`^://[^\s/:@"'<>\\]*:([^\s/"'<>\\]+)@`), nil},
	{secretBearer, "eyj", regexp.MustCompile(`^(eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)+)`), nil},
	{secretBearer, "bearer", regexp.MustCompile(`^.{6}[ \t]+([A-Za-z0-9._~+/-]{8,}=*)`), looksRandom},
	{secretPassword, "authorization", regexp.MustCompile(`(?i)^.{13}\\?["']?[ \t]*[:=][ \t]*\[?\\?["']?basic[ \t]+([A-Za-z0-9+/]{4,}={0,2})`), nil},
	{secretPassword, "pass", regexp.MustCompile(`(?i)^pass(?:word|phrase|wd)\\?["']?[ \t]*[:=][ \t]*\\?["']?([^\s"',}\\]{6,})`), looksRandom},
	{secretBearer, "token", regexp.MustCompile(`^.{5}\\?["']?[ \t]*[:=][ \t]*\\?["']?([^\s"',}\\]{12,})`), looksRandom},
}

// looksRandom distinguishes secrets from words: words have no digits, and upper case only
// at the start.
func looksRandom(secret []byte) bool {
	return bytes.ContainsAny(secret, "0123456789") || len(secret) >= 20 &&
		bytes.ContainsFunc(secret, unicode.IsLower) && bytes.ContainsFunc(secret[1:], unicode.IsUpper)
}

// spans returns the positions of the secrets of this kind, in order. lower is the text in
// lower case.
func (p pattern) spans(text, lower []byte) (spans [][2]int) {
	for at := 0; ; {
		hit := bytes.Index(lower[at:], []byte(p.literal))
		if hit < 0 {
			return spans
		}
		hit += at
		at = hit + len(p.literal)
		m := p.match.FindSubmatchIndex(text[hit:])
		if m == nil {
			continue
		}
		if secret := text[hit+m[2] : hit+m[3]]; !bytes.HasPrefix(secret, []byte(hidden)) && (p.also == nil || p.also(secret)) {
			spans = append(spans, [2]int{hit + m[2], hit + m[3]})
			at = hit + m[3]
		}
	}
}

// lowerASCII converts ASCII letters to lower case. Positions of bytes don't change.
func lowerASCII(text []byte) []byte {
	lower := bytes.Clone(text)
	for i, c := range lower {
		if 'A' <= c && c <= 'Z' {
			lower[i] = c + 'a' - 'A'
		}
	}
	return lower
}

// Lengths of the two parts of a bootstrap token, as Kubernetes defines them.
const (
	tokenID     = 6
	tokenSecret = 16
)

// bootstrapTokens finds bootstrap tokens. It skips names and numbers of a similar form.
func bootstrapTokens(text []byte) (spans [][2]int) {
	within := func(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' }
	part := func(at int) bool {
		return at >= 0 && at < len(text) && (within(text[at]) || 'A' <= text[at] && text[at] <= 'Z' || text[at] == '_' || text[at] == '-')
	}
	for at := tokenID; at+tokenSecret < len(text); at++ {
		if text[at] != '.' {
			continue
		}
		start, end := at-tokenID, at+1+tokenSecret
		all := true
		for i := start; i < end && all; i++ {
			all = i == at || within(text[i])
		}
		switch {
		case !all, part(start - 1), part(end),
			// part of a longer name
			start > 0 && text[start-1] == '.', end < len(text) && text[end] == '.' && part(end+1):
		case !bytes.ContainsFunc(text[start:end], unicode.IsLower): // a fraction
		case bytes.ContainsAny(text[start:end], "0123456789"), mentionsToken(text[:start]):
			spans = append(spans, [2]int{start, end})
			at = end
		}
	}
	return spans
}

// mentionsToken reports whether the line contains the word token: one token in a thousand
// has no digits, and looks like words.
func mentionsToken(before []byte) bool {
	return bytes.Contains(lowerASCII(before[bytes.LastIndexByte(before, '\n')+1:]), []byte("token"))
}

// scrub replaces all secrets that it recognises by their form, and counts them by kind.
// It is the second line of defence: nodes leave out the secrets that they know. All other
// text stays unchanged, to the byte. In doubt it replaces a text: readers of a bundle may
// not be administrators of the cluster.
func scrub(text []byte) ([]byte, map[string]int) {
	found := map[string]int{}
	return scrubTo(text, found, encodings), found
}

func scrubTo(text []byte, found map[string]int, depth int) []byte {
	text = replace(text, found, secretKey, privateKeys(text))
	if depth > 0 {
		text = replace(text, found, secretEncoded, encoded(text, depth-1))
	}
	text = replace(text, found, secretBootstrap, bootstrapTokens(text))
	lower := lowerASCII(text)
	for _, p := range patterns {
		if spans := p.spans(text, lower); len(spans) > 0 {
			text = replace(text, found, p.kind, spans)
			lower = lowerASCII(text)
		}
	}
	return text
}

// replace replaces the spans, which are in order.
func replace(text []byte, found map[string]int, kind string, spans [][2]int) []byte {
	if len(spans) == 0 {
		return text
	}
	found[kind] += len(spans)
	var b bytes.Buffer
	at := 0
	for _, s := range spans {
		b.Write(text[at:s[0]])
		b.WriteString(hidden)
		at = s[1]
	}
	b.Write(text[at:])
	return b.Bytes()
}

var (
	keyBegin = regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----`)
	keyEnd   = regexp.MustCompile(`-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----`)
)

// privateKeys finds PEM keys, also with a prefix on each line, with escaped line ends, or
// if a log has only the start or the end of the key.
func privateKeys(text []byte) (spans [][2]int) {
	if !bytes.Contains(text, []byte("PRIVATE KEY")) {
		return nil
	}
	begins, ends := keyBegin.FindAllIndex(text, -1), keyEnd.FindAllIndex(text, -1)
	done := 0
	for len(begins) > 0 || len(ends) > 0 {
		switch {
		case len(begins) == 0 || len(ends) > 0 && ends[0][0] < begins[0][0]:
			// The first lines are missing; the others may be enough to reconstruct an EC key.
			if start := bodyBefore(text, done, ends[0][0]); start >= 0 {
				spans = append(spans, [2]int{start, ends[0][1]})
			}
			done = ends[0][1]
			ends = ends[1:]
		case len(ends) > 0 && ends[0][0]-begins[0][1] < maxPEM && (len(begins) == 1 || ends[0][0] < begins[1][0]):
			spans = append(spans, [2]int{begins[0][0], ends[0][1]})
			done = ends[0][1]
			begins, ends = begins[1:], ends[1:]
		default:
			limit := len(text)
			if len(begins) > 1 {
				limit = begins[1][0]
			}
			done = begins[0][1]
			if stop := bodyAfter(text[:limit], begins[0][1]); stop >= 0 {
				spans = append(spans, [2]int{begins[0][0], stop})
				done = stop
			}
			begins = begins[1:]
		}
	}
	return spans
}

// keyLine matches a line with only base64 after the prefix of the log.
var keyLine = regexp.MustCompile(`(?:^|\s)([A-Za-z0-9+/]+={0,2})[ \t"',}\]]*$`)

// bodyAfter returns where the lines of a key without its last lines end, or -1 if the
// text only mentions a key.
func bodyAfter(text []byte, start int) int {
	stop, column := -1, -1
	for at := start; at < len(text); {
		end, next := endOfLine(text, at)
		m := keyLine.FindSubmatchIndex(text[at:end])
		switch {
		case m != nil && m[3]-m[2] >= minEncoded:
			stop, column = at+m[3], m[2]
		case m != nil && m[2] == column:
			return at + m[3] // the last line is shorter
		case at != start:
			return stop
		}
		at = next
	}
	return stop
}

// bodyBefore returns where the lines of a key without its first lines start, or -1 if
// there are none.
func bodyBefore(text []byte, from, end int) int {
	start, total := -1, 0
	from = max(from, end-maxPEM)
	var lines [][2]int
	for at := from; at < end; {
		stop, next := endOfLine(text[:end], at)
		lines = append(lines, [2]int{at, stop})
		at = next
	}
	if n := len(lines); n > 0 && lines[n-1][1] == end {
		lines = lines[:n-1] // what stands before the end on its line
	}
	for i := len(lines) - 1; i >= 0; i-- {
		m := keyLine.FindSubmatchIndex(text[lines[i][0]:lines[i][1]])
		if m == nil || total > 0 && m[3]-m[2] < minEncoded {
			break
		}
		start = lines[i][0] + m[2]
		total += m[3] - m[2]
	}
	if total < minEncoded {
		return -1
	}
	return start
}

// endOfLine returns where a line ends and where the next one starts. Line ends may be
// escaped.
func endOfLine(text []byte, at int) (end, next int) {
	for end = at; end < len(text); end++ {
		if n := lineEnd(text[end:]); n > 0 {
			return end, end + n
		}
	}
	return end, end
}

// lineEnd returns the length of the line end at the start of the text, or 0.
func lineEnd(text []byte) int {
	n := 0
	for _, form := range []string{"\r", `\r`, "\n", `\n`} { // CR comes first where there are both
		if bytes.HasPrefix(text[n:], []byte(form)) {
			n += len(form)
		}
	}
	return n
}

// encoded finds runs of base64 that contain a secret.
func encoded(text []byte, depth int) (spans [][2]int) {
	for at := 0; at < len(text); {
		if !isBase64(text[at]) {
			at++
			continue
		}
		first := token(text, at)
		if first-at < minEncoded {
			at = first
			continue
		}
		end := wrapped(text, at, first)
		if holdsSecret(join(text[at:end]), depth) {
			spans = append(spans, [2]int{at, end})
		}
		at = end
	}
	return spans
}

func isBase64(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '+' || c == '/' || c == '-' || c == '_'
}

// token returns where the run of base64 from start ends, on this line.
func token(text []byte, start int) int {
	at := start
	for at < len(text) && isBase64(text[at]) {
		at++
	}
	for padding := 0; padding < 2 && at < len(text) && text[at] == '='; padding++ {
		at++
	}
	return at
}

// wrapped returns where base64 on several lines ends: all lines have the same length,
// except the last one, and contain nothing else.
func wrapped(text []byte, start, end int) int {
	for width := end - start; ; {
		next := lineBreak(text, end)
		if next == end || text[end-1] == '=' || width > maxWrapped {
			return end
		}
		last := token(text, next)
		if n := last - next; n == 0 || n > width || last < len(text) && lineBreak(text, last) == last && text[last] != '"' && text[last] != '\'' {
			return end
		} else if n < width {
			return last
		}
		end = last
	}
}

// lineBreak returns where the text of the next line starts, or at if there is no line
// end.
func lineBreak(text []byte, at int) int {
	n := lineEnd(text[at:])
	if n == 0 {
		return at
	}
	next := at + n
	for next < len(text) && (text[next] == ' ' || text[next] == '\t') {
		next++
	}
	return next
}

var escapes = regexp.MustCompile(`\\[nr]|\s+`)

// join removes line ends from base64.
func join(run []byte) []byte {
	if bytes.ContainsAny(run, "\\\r\n") {
		run = escapes.ReplaceAll(run, nil)
	}
	return bytes.TrimRight(run, "=")
}

// holdsSecret decodes base64 of either alphabet and searches it for secrets. The data may
// start up to three characters late, because the text before it may consist of base64
// letters.
func holdsSecret(run []byte, depth int) bool {
	// Both alphabets may be mixed, because a name before the data may use the other one.
	run = bytes.ReplaceAll(bytes.ReplaceAll(run, []byte("-"), []byte("+")), []byte("_"), []byte("/"))
	plain := make([]byte, base64.RawStdEncoding.DecodedLen(len(run)))
	for late := range min(4, len(run)) {
		part := run[late:]
		if len(part)%4 == 1 {
			part = part[:len(part)-1]
		}
		n, _ := base64.RawStdEncoding.Decode(plain, part) // it decodes everything before the first error
		if bytes.Contains(plain[:n], []byte("PRIVATE KEY")) {
			return true
		}
		if !printable(plain[:n]) {
			continue
		}
		found := map[string]int{}
		if scrubTo(plain[:n], found, depth); len(found) > 0 {
			return true
		}
	}
	return false
}

// printable reports whether most bytes are printable text. Of random bytes, less than
// half are; data that was decoded from a wrong start has a few bytes that aren't.
func printable(text []byte) bool {
	count := 0
	for _, c := range text {
		if c >= ' ' && c < 0x7f || c == '\n' || c == '\r' || c == '\t' {
			count++
		}
	}
	return 4*count > 3*len(text)
}
