package config

import (
	"cmp"
	"errors"
	"reflect"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/config/pki"
)

// valueRule is what a value must be besides its type. fields.yaml says what its fields mean.
type valueRule struct {
	Missing           *string
	Like              pattern
	Choices           []string
	Form, Must, Twice string
	Min, Max          int64
	Idle              bool
	Value             *valueRule
}

// valueGroup is about several fields of an entry. fields.yaml says what it means.
type valueGroup struct {
	Fields      []string
	Least, Most int
	Together    bool
	Must        string
}

// valueForms say what is wrong with a value, by the names that the rules have for them.
var valueForms = map[string]func(reflect.Value) error{
	"absolute path":    form(checkAbsolute),
	"certificate name": form(func(name string) error { return checkHost(strings.TrimPrefix(name, "*.")) }),
	"certificate":      parsed(pki.ParseCert),
	"device":           form(checkDevice),
	"DNS name":         form(checkDNSName),
	"document":         form(checkDocument),
	"endpoint":         form(checkEndpointOfPeer),
	"host":             form(checkHost),
	"host name":        form(checkHostName),
	"Kubernetes API":   form(checkKubernetesAPI),
	"image":            form(CheckImage),
	"kernel argument":  form(checkKernelArg),
	"key of 32 bytes":  form(checkKey32),
	"label":            form(checkLabel),
	"link":             form(checkLinkName),
	"log endpoint":     form(checkLogEndpoint),
	"network":          form(checkNetwork),
	"ports":            form(func(text string) error { _, _, err := Ports(text); return err }),
	"private key":      parsed(pki.ParseKey),
	"public key":       parsed(pki.ParsePublicKey),
	"registry":         form(checkRegistryHost),
	"release key":      form(checkReleaseKey),
	"server":           form(checkServer),
	"sysfs path":       form(checkSysfsPath),
	"token":            form(checkToken),
	"udev rule":        parsed(ParseUdevRule),
	"URL":              form(checkHTTP),
}

func form[T any](check func(T) error) func(reflect.Value) error {
	return func(v reflect.Value) error { return check(v.Convert(reflect.TypeFor[T]()).Interface().(T)) }
}

func parsed[T, R any](parse func(T) (R, error)) func(reflect.Value) error {
	return form(func(v T) error { _, err := parse(v); return err })
}

// values looks at each value for itself. Problems of several values together are those of other checks.
type values struct {
	*report
	seen map[string]bool // values by their paths
}

func checkValues(c *Config, r *report) {
	values{r, map[string]bool{}}.fields(reflect.ValueOf(c).Elem(), "", nil)
}

// fields is for a struct. path is its path in the schema, where its place in the document.
func (s values) fields(v reflect.Value, path string, where place) {
	set := map[string]bool{}
	for f, field := range v.Fields() {
		name := f.Tag.Get("yaml")
		set[name] = !field.IsZero()
		s.value(field, join(path, name), where.with(name))
	}
	for _, g := range tables().Groups[path] {
		n := 0
		for _, name := range g.Fields {
			if set[name] {
				n++
			}
		}
		if n < g.Least || g.Most > 0 && n > g.Most || g.Together && n%len(g.Fields) != 0 {
			s.bad(where, "%s", g.Must)
		}
	}
}

func (s values) value(v reflect.Value, path string, where place) {
	s.judge(tables().Values[path], v, path, where)
	inner, _ := element(v.Type())
	switch {
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() != reflect.Uint8:
		for i := range v.Len() {
			s.value(v.Index(i), path+"[]", where.with(i))
		}
	case v.Kind() == reflect.Map:
		for _, key := range keysOf(v, v) {
			if rule := tables().Values[path+"[]"]; rule != nil {
				s.judge(rule, key, path+"[]", where.with(key.String()))
				s.judge(rule.Value, v.MapIndex(key), path, where.with(key.String()))
			}
			if inner != nil {
				s.fields(v.MapIndex(key), path+"[]", where.with(key.String()))
			}
		}
	case inner != nil && reflect.Indirect(v).IsValid():
		s.fields(reflect.Indirect(v), path, where)
	}
}

// judge compares a value, or the key of a mapping, with its rule.
func (s values) judge(rule *valueRule, v reflect.Value, path string, where place) {
	none := v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0
	switch {
	case rule == nil:
		return
	case none && rule.Missing != nil:
		s.lacks(where, *rule.Missing)
		return
	case none && v.Kind() == reflect.Pointer:
		return
	}
	if rule.Idle && !none {
		s.warn(where, "has no effect in this release")
	}
	v = reflect.Indirect(v)
	shown, id := plainShow(v), path+" "+plainShow(v)
	switch v.Kind() {
	case reflect.String:
		shown = quote(shown)
	case reflect.Slice, reflect.Map:
		shown = strconv.Itoa(v.Len())
	}
	if err := rule.refuses(v, none && !strings.HasSuffix(path, "[]")); err != nil {
		s.bad(where, "%s", strings.ReplaceAll(cmp.Or(rule.Must, err.Error()), "%v", shown))
	} else if rule.Twice != "" && s.seen[id] {
		s.bad(where, "%s", strings.ReplaceAll(rule.Twice, "%v", shown))
	}
	s.seen[id] = true
}

var errUnlike = errors.New("is not possible")

// refuses says what is wrong with a value. One that isn't there has no form.
func (rule *valueRule) refuses(v reflect.Value, none bool) error {
	switch {
	case v.Kind() == reflect.String && !rule.Like.matches(v.String()):
		return errUnlike
	case none:
		return nil
	case rule.Max != 0 && (size(v) < rule.Min || size(v) > rule.Max):
		return errUnlike
	case rule.Choices != nil:
		return checkOneOf(v.String(), rule.Choices)
	case rule.Form != "":
		return valueForms[rule.Form](v)
	}
	return nil
}

// size is a number itself, or the length of a value.
func size(v reflect.Value) int64 {
	switch v.Kind() {
	case reflect.String, reflect.Slice, reflect.Map:
		return int64(v.Len())
	}
	return v.Convert(reflect.TypeFor[int64]()).Int()
}
