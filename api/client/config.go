// Package client connects to nodes, for users and programs on other machines. The file
// garboardconfig has one context for each cluster, with its addresses, the certificate
// and the key: an administrator needs only this file.
package client

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

const (
	// EnvConfig names the file in the environment.
	EnvConfig = "GARBOARDCONFIG"
	// maxConfigSize bounds what is read: a context has about 3 KiB.
	maxConfigSize = 1 << 20

	configMode = 0o600 // it holds private keys
	configDir  = 0o700
)

// header stands above every file that Save writes.
const header = `# The client configuration of gbctl. It contains private keys.
# endpoints are control planes. Best is a DNS name that points to all of them: it is
# in their certificates, and stays the same when control planes change.
`

// Config is a garboardconfig.
type Config struct {
	Context  string              `yaml:"context"` // the current context
	Contexts map[string]*Context `yaml:"contexts"`
	// Other has fields of later releases; Save keeps them.
	Other map[string]any `yaml:",inline"`
}

// Context is a cluster, and the identity of the user there.
type Context struct {
	Endpoints []string `yaml:"endpoints"`       // control planes: address or name, port 50000 unless given
	Nodes     []string `yaml:"nodes,omitempty"` // used when a command names none
	CA        string   `yaml:"ca"`              // base64 of PEM, as the next two
	Crt       string   `yaml:"crt"`
	Key       string   `yaml:"key"`
	// Via maps the address or name of a node to the host:port to dial, for nodes behind a
	// forwarded port. The certificate must still be that of the node. A host:port is that of
	// the Kubernetes API, for kubeconfigs.
	Via   map[string]string `yaml:"via,omitempty"`
	Other map[string]any    `yaml:",inline"`
}

// DefaultPath is $GARBOARDCONFIG, else ~/.garboard/config.
func DefaultPath() (string, error) {
	if path := os.Getenv(EnvConfig); path != "" {
		return path, nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find the client configuration: %w; set $%s", err, EnvConfig)
	}
	return filepath.Join(home, ".garboard", "config"), nil
}

// Load reads a file. The error of one that doesn't exist is fs.ErrNotExist.
func Load(path string) (*Config, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read client configuration: %w; 'gbctl gen config' makes one, $%s sets its path", err, EnvConfig)
	} else if err != nil {
		return nil, fmt.Errorf("read client configuration: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > maxConfigSize {
		return nil, fmt.Errorf("read client configuration: %s has %d bytes, more than %d", path, info.Size(), maxConfigSize)
	}
	c := &Config{}
	// An empty file is an empty configuration.
	if err := yaml.NewDecoder(f).Decode(c); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read client configuration %s: %w", path, err)
	}
	for name, context := range c.Contexts {
		if context == nil {
			return nil, fmt.Errorf("read client configuration %s: context %q is empty", path, name)
		}
	}
	return c, nil
}

// Encode is the file's text.
func (c *Config) Encode() ([]byte, error) {
	b := bytes.NewBufferString(header)
	enc := yaml.NewEncoder(b)
	enc.SetIndent(2)
	if err := enc.Encode(c); err != nil {
		return nil, fmt.Errorf("encode client configuration: %w", err)
	}
	return b.Bytes(), enc.Close()
}

// Save replaces the file atomically, and makes its directory. If path is a symbolic link,
// it replaces the target.
func (c *Config) Save(path string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write client configuration %s: %w", path, err)
		}
	}()
	data, err := c.Encode()
	if err != nil {
		return err
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, configDir); err != nil {
		return err
	}
	// CreateTemp makes it for the owner alone.
	f, err := os.CreateTemp(dir, ".garboardconfig.*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails after the rename
	_, err = f.Write(data)
	if err := errors.Join(err, f.Chmod(configMode), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// Merge adds the contexts of other, and makes the current context of other the current
// one. If the name of a context is taken by a different one, it gets a number as suffix;
// renamed maps such names.
func (c *Config) Merge(other *Config) (renamed map[string]string) {
	renamed = map[string]string{}
	if c.Contexts == nil {
		c.Contexts = map[string]*Context{}
	}
	current := other.Context
	for _, name := range slices.Sorted(maps.Keys(other.Contexts)) {
		free := name
		for n := 1; c.Contexts[free] != nil && !reflect.DeepEqual(c.Contexts[free], other.Contexts[name]); n++ {
			free = fmt.Sprintf("%s-%d", name, n)
		}
		c.Contexts[free] = other.Contexts[name]
		if free != name {
			renamed[name] = free
		}
		if name == other.Context {
			current = free
		}
	}
	if current != "" {
		c.Context = current
	}
	return renamed
}

// Current returns the context with a name, or the current one if name is empty. The error
// lists the contexts.
func (c *Config) Current(name string) (*Context, error) {
	names := strings.Join(slices.Sorted(maps.Keys(c.Contexts)), ", ")
	if name == "" {
		name = c.Context
	}
	switch context := c.Contexts[name]; {
	case context != nil:
		return context, nil
	case names == "":
		return nil, errors.New("the client configuration has no contexts; 'gbctl gen config' makes a file to merge into it")
	case name == "":
		return nil, fmt.Errorf("the client configuration has no current context; the contexts are %s", names)
	}
	return nil, fmt.Errorf("no context %q in the client configuration; the contexts are %s", name, names)
}

// Credentials returns the authority and the certificate of the user.
func (c *Context) Credentials() (*x509.CertPool, tls.Certificate, error) {
	var decoded [3][]byte
	for i, field := range []struct{ name, text string }{{"ca", c.CA}, {"crt", c.Crt}, {"key", c.Key}} {
		// Line breaks come from tools that wrap base64.
		data, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(field.text), ""))
		if err != nil || len(data) == 0 {
			return nil, tls.Certificate{}, fmt.Errorf("client configuration: %s must be base64 of PEM", field.name)
		}
		decoded[i] = data
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(decoded[0]) {
		return nil, tls.Certificate{}, errors.New("client configuration: no certificate in ca")
	}
	pair, err := tls.X509KeyPair(decoded[1], decoded[2])
	if err != nil {
		return nil, tls.Certificate{}, fmt.Errorf("client configuration: crt and key: %w", err)
	}
	return roots, pair, nil
}
