package patch

import "testing"

// The examples of RFC 6902, appendix A, by number, if they are about types that
// a configuration can have: text, numbers, lists and mappings.
func TestRFC6902(t *testing.T) {
	for _, tt := range []struct{ section, doc, patch, want string }{
		{"A.1", "foo: bar\n", `[{"op": "add", "path": "/baz", "value": "qux"}]`, "foo: bar\nbaz: qux\n"},
		{"A.2", "foo: [bar, baz]\n", `[{"op": "add", "path": "/foo/1", "value": "qux"}]`, "foo: [bar, qux, baz]\n"},
		{"A.3", "baz: qux\nfoo: bar\n", `[{"op": "remove", "path": "/baz"}]`, "foo: bar\n"},
		{"A.4", "foo: [bar, qux, baz]\n", `[{"op": "remove", "path": "/foo/1"}]`, "foo: [bar, baz]\n"},
		{"A.5", "baz: qux\nfoo: bar\n", `[{"op": "replace", "path": "/baz", "value": "boo"}]`, "baz: boo\nfoo: bar\n"},
		{"A.6", "foo: {bar: baz, waldo: fred}\nqux: {corge: grault}\n", `[{"op": "move", "from": "/foo/waldo", "path": "/qux/thud"}]`, "foo: {bar: baz}\nqux: {corge: grault, thud: fred}\n"},
		{"A.7", "foo: [all, grass, cows, eat]\n", `[{"op": "move", "from": "/foo/1", "path": "/foo/3"}]`, "foo: [all, cows, eat, grass]\n"},
		{"A.8", "baz: qux\nfoo: [a, 2, c]\n", `[{"op": "test", "path": "/baz", "value": "qux"}, {"op": "test", "path": "/foo/1", "value": 2}]`, "baz: qux\nfoo: [a, 2, c]\n"},
		{"A.9", "baz: qux\n", `[{"op": "test", "path": "/baz", "value": "bar"}]`, ""},
		{"A.10", "foo: bar\n", `[{"op": "add", "path": "/child", "value": {"grandchild": {}}}]`, "foo: bar\nchild:\n  grandchild: {}\n"},
		{"A.11", "foo: bar\n", `[{"op": "add", "path": "/baz", "value": "qux", "xyz": 123}]`, "foo: bar\nbaz: qux\n"},
		{"A.12", "foo: bar\n", `[{"op": "add", "path": "/baz/bat", "value": "qux"}]`, ""},
		{"A.14", "/: 9\n~1: 10\n", `[{"op": "test", "path": "/~01", "value": 10}]`, "/: 9\n~1: 10\n"},
		{"A.15", "/: 9\n~1: 10\n", `[{"op": "test", "path": "/~01", "value": "10"}]`, ""},
		{"A.16", "foo: [bar]\n", `[{"op": "add", "path": "/foo/-", "value": ["abc", "def"]}]`, "foo: [bar, [abc, def]]\n"},
	} {
		t.Run(tt.section, func(t *testing.T) {
			got, err := Apply([]byte(tt.doc), []byte(tt.patch))
			if (err != nil) != (tt.want == "") {
				t.Error(err)
			}
			want(t, tt.want, string(got))
		})
	}
}
