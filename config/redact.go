package config

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/tree"
)

// Redact returns the text of a document with "(secret)" for everything that
// must not leave the node: secrets by type, contents of files that aren't
// public, the environment, manifests of Kubernetes secrets, and what RedactText finds.
// Comments, order and style stay. The document need not be valid, because
// support must be able to see a broken one. Unknown keys are redacted if their
// names suggest secrets.
func Redact(doc []byte) ([]byte, error) {
	root, err := tree.Parse(doc)
	if err != nil {
		return nil, fmt.Errorf("redact configuration: %w", err)
	}
	r := redaction{pointedAt: map[*yaml.Node]bool{}}
	r.comments(root)
	root.Content[0] = r.node(root.Content[0], reflect.TypeFor[Config]())
	r.anchors(root)
	text, err := tree.Text(doc, root)
	if err != nil {
		return nil, fmt.Errorf("redact configuration: %w", err)
	}
	return text, nil
}

// redaction is one run of Redact. It goes through the tree and never follows an
// alias, so that aliases have no cost.
type redaction struct {
	pointedAt map[*yaml.Node]bool // nodes that an alias refers to from the place of a secret
}

var (
	secretType = reflect.TypeFor[Secret]()
	keyType    = reflect.TypeFor[KeyPEM]()
	urlType    = reflect.TypeFor[URL]()
	pemType    = reflect.TypeFor[PEM]()

	// secretName matches names of fields whose values are secret.
	secretName = regexp.MustCompile(`(?i)(secret|token|password|passphrase|private|credential|auth$|^key$|key$)`)
	// secretComment matches a field that was commented out.
	secretComment  = regexp.MustCompile(`(?im)^(\s*#+\s*(?:- )?["']?\w*(?:secret|token|password|passphrase|private|credential|auth|key)\w*["']?\s*[:=]\s*)\S.*$`)
	privatePEM     = regexp.MustCompile(`-----BEGIN [A-Z ]*PRIVATE KEY-----`)
	secretManifest = regexp.MustCompile(`(?m)\bkind["']?:\s*["']?Secret\b`)
)

// node is the node without secrets. t is its type in the schema, or nil.
func (r *redaction) node(n *yaml.Node, t reflect.Type) *yaml.Node {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == secretType || t == keyType {
		return r.hidden(n)
	}
	switch n.Kind {
	case yaml.MappingNode:
		r.mapping(n, t)
	case yaml.SequenceNode:
		inner := t
		if t != nil && t.Kind() == reflect.Slice {
			inner = t.Elem()
		}
		for i := range n.Content {
			n.Content[i] = r.node(n.Content[i], inner)
		}
	case yaml.ScalarNode:
		return scalar(n, t)
	}
	return n
}

func (r *redaction) mapping(n *yaml.Node, t reflect.Type) {
	if t != nil && t.Kind() == reflect.Slice {
		t = t.Elem() // a single entry for a list of one
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i].Value, n.Content[i+1]
		inner, known := fieldType(t, key)
		switch {
		case !known && secretName.MatchString(key), t == fileType && key == "content" && !isPublic(n), t == envType && !openEnv(key), t == manifestType && key == "contents" && secretManifest.MatchString(value.Value):
			n.Content[i+1] = r.hidden(value)
		default:
			n.Content[i+1] = r.node(value, inner)
		}
	}
}

var (
	fileType     = reflect.TypeFor[File]()
	manifestType = reflect.TypeFor[InlineManifest]()
	envType      = reflect.TypeFor[Env]()
)

// openEnv reports whether everybody may see a variable, without the credentials in its URL.
// Nothing else says which ones are no secrets.
func openEnv(name string) bool {
	return slices.Contains([]string{"http_proxy", "https_proxy", "no_proxy", "all_proxy"}, strings.ToLower(name))
}

// fieldType is the type of the field key inside t, if the schema has it.
func fieldType(t reflect.Type, key string) (reflect.Type, bool) {
	if t == nil {
		return nil, false
	}
	switch t.Kind() {
	case reflect.Map:
		// The user chooses the names of arguments, labels and environment variables.
		// Only the names in a struct of this package are known to be no secrets.
		return t.Elem(), t.Elem().Kind() == reflect.Struct
	case reflect.Struct:
		if canonical, old := renamed[key]; old {
			key = canonical
		}
		if f, ok := fieldByName(t, key); ok {
			return f.Type, true
		}
	}
	return nil, false
}

// isPublic reports whether everybody may see a file's content.
func isPublic(file *yaml.Node) bool {
	public := tree.Field(file, "public")
	return public != nil && resolve(public).Value == "true"
}

// holdsSecret reports whether the text called name inside v must be treated as
// a secret. v is a struct of this package.
func holdsSecret(v reflect.Value, name string) bool {
	switch x := v.Interface().(type) {
	case File:
		return name == "content" && (!x.Public || privatePEM.MatchString(x.Content))
	case InlineManifest:
		return name == "contents" && secretManifest.MatchString(x.Contents)
	}
	return false
}

func scalar(n *yaml.Node, t reflect.Type) *yaml.Node {
	value := n.Value
	switch {
	case privatePEM.MatchString(value):
		return replaced(n, redacted)
	case t == pemType: // certificates, perhaps with their key
		var p PEM
		if p.UnmarshalText([]byte(value)) == nil && privatePEM.Match(p) {
			return replaced(n, redacted)
		}
	case t == urlType:
		if u, err := ParseURL(value); err == nil && (u.User != nil || u.RawQuery != "") {
			value = u.Redacted()
		}
	}
	if value = RedactText(value); value == n.Value {
		return n
	}
	return replaced(n, value)
}

// hidden is the node to show instead of a secret. An empty secret is shown as it is.
func (r *redaction) hidden(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.ScalarNode && (n.Value == "" || n.Value == redacted) || tree.IsNull(n) {
		return n
	}
	if n.Kind == yaml.AliasNode {
		r.pointedAt[n.Alias] = true
	}
	return replaced(n, redacted)
}

// anchors hides the nodes elsewhere that aliases in the place of secrets refer to.
func (r *redaction) anchors(n *yaml.Node) {
	for i, inner := range n.Content {
		if r.pointedAt[inner] {
			n.Content[i] = replaced(inner, redacted)
		} else {
			r.anchors(inner)
		}
	}
}

// replaced is a text node in the place of n, with the comments of n and its
// anchor: an alias to it must stay valid.
func replaced(n *yaml.Node, text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text, Anchor: n.Anchor, HeadComment: n.HeadComment, LineComment: n.LineComment, FootComment: n.FootComment}
}

// comments hides secrets in comments.
func (r *redaction) comments(n *yaml.Node) {
	for _, c := range []*string{&n.HeadComment, &n.LineComment, &n.FootComment} {
		if *c != "" {
			*c = secretComment.ReplaceAllString(*c, "${1}"+redacted)
			if privatePEM.MatchString(*c) {
				*c = "# " + redacted
			}
		}
	}
	for _, inner := range n.Content {
		r.comments(inner)
	}
}

// hiddenPart stands for a part of a text that is secret.
const hiddenPart = "xxxxx"

// Secrets in texts that have no schema: lines of logs and of the kernel, command lines,
// values of the configuration. The first group stays.
var secretParts = []*regexp.Regexp{
	// What stands before the host in a URL: a password, or a token alone.
	regexp.MustCompile(`(://(?:[^/\s:@]*:)?)[^/\s@]+@`),
	// A value whose name suggests a secret: an option, a variable, a part of a query.
	regexp.MustCompile(`(?i)([\w.-]*(?:token|pass|passw(?:or)?d|passphrase|credentials?|api_?-?key|private_?-?key|[_.-]secret|[_.-]key|signature|[?&]sig|[?&]key|auth)\\?["']?=\\?["']?)[^\s"'\\&;,=][^\s"'\\&;,]*`),
	// The place of the configuration: its query, or the whole document.
	regexp.MustCompile(`(garboard\.config=(?:data:|[^\s?]*\?))[^\s"]+`),
}

// RedactText is a text without the secrets that its form shows: credentials in URLs, values
// with names such as password, private keys.
func RedactText(text string) string {
	if privatePEM.MatchString(text) {
		return redacted
	}
	if !strings.ContainsAny(text, "@=") {
		return text // as most texts
	}
	for i, secret := range secretParts {
		with := "${1}" + hiddenPart
		if i == 0 {
			with += "@"
		}
		text = secret.ReplaceAllString(text, with)
	}
	return text
}
