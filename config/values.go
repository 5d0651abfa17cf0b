package config

import (
	"cmp"
	"crypto/rand"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/garboard-os/garboard/config/pki"
)

// redacted is how a secret is printed.
const redacted = "(secret)"

// Secret is text that prints, logs and marshals as "(secret)". Only Encode
// writes it; use string(s) for the value.
type Secret string

func (Secret) String() string               { return redacted }
func (Secret) GoString() string             { return redacted }
func (Secret) LogValue() slog.Value         { return slog.StringValue(redacted) }
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// PEM is PEM text; in YAML it is base64 of that.
type PEM []byte

func (p PEM) MarshalText() ([]byte, error) { return []byte(encodePEM(p)), nil }

func (p *PEM) UnmarshalText(text []byte) (err error) {
	*p, err = decodePEM(text)
	return err
}

// KeyPEM is PEM with a private key, which is a secret.
type KeyPEM []byte

func (KeyPEM) String() string               { return redacted }
func (KeyPEM) GoString() string             { return redacted }
func (KeyPEM) LogValue() slog.Value         { return slog.StringValue(redacted) }
func (KeyPEM) MarshalText() ([]byte, error) { return []byte(redacted), nil }

func (p *KeyPEM) UnmarshalText(text []byte) (err error) {
	*p, err = decodePEM(text)
	return err
}

func encodePEM(data []byte) string { return base64.StdEncoding.EncodeToString(data) }

// decodePEM doesn't repeat the text in its errors: it may be a key.
func decodePEM(text []byte) ([]byte, error) {
	if strings.HasPrefix(strings.TrimSpace(string(text)), "-----BEGIN") {
		return nil, errors.New("PEM must be base64-encoded once more (base64 -w0 FILE)")
	}
	// Line breaks come from tools that wrap base64.
	data, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		return nil, errors.New("not base64")
	}
	if block, _ := pem.Decode(data); block == nil {
		return nil, errors.New("no PEM inside the base64")
	}
	return data, nil
}

// CertKey is a certificate and its private key.
type CertKey struct {
	Crt PEM    `yaml:"crt"` // certificate
	Key KeyPEM `yaml:"key"` // its private key, PKCS#1, PKCS#8 or SEC 1
}

// CA is the pair as an authority.
func (c CertKey) CA() pki.CA { return pki.CA{Cert: c.Crt, Key: c.Key} }

// URL is an absolute URL.
type URL struct{ url.URL }

// ParseURL accepts absolute URLs with a host only.
func ParseURL(text string) (URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		if inner, ok := errors.AsType[*url.Error](err); ok {
			err = inner.Err // the outer error repeats the text
		}
		return URL{}, fmt.Errorf("not a URL: %w", err)
	case u.Scheme == "" || u.Host == "":
		return URL{}, errors.New("not an absolute URL such as https://host:port/path")
	}
	return URL{*u}, nil
}

func (u URL) String() string               { return u.URL.String() }
func (u URL) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// registryAPI is the path below which a registry answers, by the OCI distribution specification.
const registryAPI = "/v2"

// RegistryPath is the path below which the registry or mirror at a URL has its repositories. A path that neither begins
// nor ends with /v2 is that of a whole registry behind a proxy.
func RegistryPath(u url.URL, override bool) string {
	root := strings.TrimRight(u.Path, "/")
	if override || strings.HasPrefix(root, registryAPI+"/") || strings.HasSuffix(root, registryAPI) {
		return root
	}
	return root + registryAPI
}

// Redacted is the URL without what may be secret: its password, and the values of its query.
func (u URL) Redacted() string {
	query := u.Query()
	for name := range query {
		query.Set(name, "xxxxx")
	}
	u.RawQuery = query.Encode()
	return u.URL.Redacted()
}

func (u *URL) UnmarshalText(text []byte) (err error) {
	*u, err = ParseURL(string(text))
	return err
}

// Taint is the value and the effect of a taint; in YAML value:effect, or only
// the effect.
type Taint struct{ Value, Effect string }

// taintEffects are those of Kubernetes.
var taintEffects = []string{"NoSchedule", "PreferNoSchedule", "NoExecute"}

// NodeUser is the beginning of the name of a node's user in Kubernetes. The node's name follows.
const NodeUser = "system:node:"

// ControlPlaneRole is both the label of a control plane node and the key of its taint.
const ControlPlaneRole = "node-role.kubernetes.io/control-plane"

// Taints are all taints of the node by its configuration, by key: those of the
// user, and the one that keeps pods away from a control plane.
func (c *Config) Taints() map[string]Taint {
	all := map[string]Taint{}
	if c.Machine.Type.ControlPlane() && !c.Cluster.AllowSchedulingOnControlPlanes {
		all[ControlPlaneRole] = Taint{Effect: "NoSchedule"}
	}
	maps.Copy(all, c.Machine.Kubelet.NodeTaints)
	return all
}

func (t Taint) String() string { return strings.TrimPrefix(t.Value+":"+t.Effect, ":") }

func (t Taint) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

func (t *Taint) UnmarshalText(text []byte) error {
	value, effect, found := strings.Cut(string(text), ":")
	if !found {
		value, effect = "", value
	}
	if !slices.Contains(taintEffects, effect) {
		return fmt.Errorf("must end in an effect of Kubernetes: %s%s", strings.Join(taintEffects, ", "), didYouMean(effect, taintEffects))
	}
	if value != "" && !labelName.MatchString(value) {
		return errors.New("the value before the colon must be of letters, digits, dashes, dots and underscores, 63 at most")
	}
	*t = Taint{value, effect}
	return nil
}

// DiskType is what a disk is made of.
type DiskType string

// The types of disks.
const (
	DiskNVMe DiskType = "nvme"
	DiskSSD  DiskType = "ssd" // other disks without rotating parts
	DiskHDD  DiskType = "hdd"
)

// DiskSize compares the size of a disk; the zero value fits all.
type DiskSize struct {
	Comparison string // one of comparisons
	Bytes      uint64
}

// comparisons are the longer ones first.
var comparisons = []string{">=", "<=", "==", ">", "<"}

// Fits compares a size in bytes.
func (s DiskSize) Fits(size uint64) bool {
	c := cmp.Compare(size, s.Bytes)
	return map[string]bool{"": true, ">=": c >= 0, "<=": c <= 0, "==": c == 0, ">": c > 0, "<": c < 0}[s.Comparison]
}

func (s DiskSize) String() string {
	if s.Comparison == "" {
		return ""
	}
	return fmt.Sprintf("%s %d", s.Comparison, s.Bytes)
}
func (s DiskSize) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

func (s *DiskSize) UnmarshalText(text []byte) (err error) {
	at := slices.IndexFunc(comparisons, func(c string) bool { return strings.HasPrefix(string(text), c) })
	if at < 0 {
		return fmt.Errorf("must begin with a comparison: %s", strings.Join(comparisons, ", "))
	}
	s.Comparison = comparisons[at]
	s.Bytes, err = humanize.ParseBytes(strings.TrimSpace(strings.TrimPrefix(string(text), s.Comparison)))
	if err != nil || s.Bytes == 0 {
		return errors.New("must have a size after the comparison, such as 100GB or 2TiB")
	}
	return nil
}

// FileSystem is one that the node makes.
type FileSystem string

// The file systems.
const (
	XFS  FileSystem = "xfs"
	Ext4 FileSystem = "ext4"
)

// ByteSize is a number of bytes.
type ByteSize uint64

func (s ByteSize) String() string {
	if s == 0 {
		return ""
	}
	return strconv.FormatUint(uint64(s), 10)
}
func (s ByteSize) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

func (s *ByteSize) UnmarshalText(text []byte) error {
	bytes, err := humanize.ParseBytes(string(text))
	if err != nil || bytes == 0 {
		return errors.New("is not a size, such as 100GB or 2TiB")
	}
	*s = ByteSize(bytes)
	return nil
}

// FileMode is the permission bits of a file, octal in YAML.
type FileMode fs.FileMode

func (m FileMode) String() string               { return fmt.Sprintf("%04o", uint32(m)) }
func (m FileMode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

func (m *FileMode) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(strings.TrimPrefix(string(text), "0o"), 8, 32)
	if err != nil || v > 0o777 {
		return errors.New("not octal permissions between 0000 and 0777, such as 0644")
	}
	*m = FileMode(v)
	return nil
}

// Joined is a list as text.
func Joined[T fmt.Stringer](all []T, separator string) string {
	return strings.Join(texts(all), separator)
}

func texts[T fmt.Stringer](all []T) (made []string) {
	for _, one := range all {
		made = append(made, one.String())
	}
	return made
}

// NewKey32 makes 32 random bytes, as base64.
func NewKey32() Secret {
	key := make([]byte, keyBytes)
	rand.Read(key) // never fails, see crypto/rand
	return Secret(base64.StdEncoding.EncodeToString(key))
}

// IsToken reports whether a text has the form of a token with which nodes join.
func IsToken(text string) bool { return bootstrapToken.MatchString(text) }

// NewToken makes a bootstrap token: 22 characters of 36 kinds, 113 bits.
func NewToken() Secret {
	const alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
	const id, secret = 6, 16
	var token []byte
	for random := make([]byte, 1); len(token) < id+secret; {
		rand.Read(random)
		// Bytes above the last whole multiple would make some letters more likely.
		if b := int(random[0]); b < 256/len(alphabet)*len(alphabet) {
			token = append(token, alphabet[b%len(alphabet)])
		}
	}
	return Secret(string(token[:id]) + "." + string(token[id:]))
}
