package main

import (
	"bytes"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/garboard-os/garboard/config/pki"
)

// compatSelfHosted is the only older format that gen config makes.
const compatSelfHosted = "self-hosted"

// configFlags are the flags of gen config.
type configFlags struct {
	options     config.Options
	withSecrets string
	dir         string
	compat      string
	patches     nodePatches
}

func (g *generator) configCommand() *cobra.Command {
	var o configFlags
	cmd := command("config NAME ENDPOINT", func(cmd *cobra.Command, args []string) error {
		if strings.Contains(args[0], "://") {
			return didYouMean("the name comes first", []string{"gen", "config", args[1], args[0]})
		}
		return g.config(cmd.OutOrStdout(), args[0], args[1], &o)
	})
	cmd.Args = cobra.ExactArgs(2)
	f := cmd.Flags()
	f.StringVar(&o.withSecrets, "with-secrets", "", "file with the secrets of the cluster (default: new secrets)")
	f.StringVar(&o.dir, "output-dir", ".", "directory for the files")
	f.StringVar(&o.options.InstallDisk, "install-disk", "", "disk to install to, such as /dev/sda")
	mirrorsVar(f, &o.options.Mirrors, "use URL instead of the registry HOST; '*' is every registry")
	f.StringSliceVar(&o.options.CertSANs, "additional-sans", nil, "additional names and addresses in the certificates of the control planes")
	f.StringVar(&o.options.KubernetesVersion, "kubernetes-version", config.KubernetesVersion, "version of Kubernetes")
	o.patches.add(f)
	f.StringVar(&o.compat, "compat", "", "self-hosted: the format for releases with a self-hosted control plane")
	return cmd
}

func (g *generator) config(out io.Writer, name, endpointText string, o *configFlags) error {
	endpoint, completed, err := config.ParseEndpoint(endpointText)
	if err != nil {
		return &exitError{codeUsage, err}
	}
	if _, err := netip.ParseAddr(endpoint.Hostname()); err != nil && strings.Trim(endpoint.Hostname(), "0123456789.") == "" {
		return usagef("%q is no address: it has four numbers up to 255; type 'gbctl gen config %s https://ADDRESS:6443', with the address or the name of the Kubernetes API",
			endpoint.Hostname(), shellWord(name))
	}
	if o.compat != "" && o.compat != compatSelfHosted {
		return usagef("--compat=%s: the only other format is %s", o.compat, compatSelfHosted)
	}
	o.options.ClusterName, o.options.Endpoint, o.options.Now = name, endpoint.String(), g.now()
	if o.options.Secrets, err = g.clusterSecrets(o); err != nil {
		return err
	}
	outputs, about, err := o.documents()
	if err != nil {
		return err
	}
	access, until, err := adminConfig(name, endpoint.Hostname(), o.options.Secrets.MachineCA.CA(), g.now())
	if err != nil {
		return err
	}
	outputs = append(outputs, output{path: filepath.Join(o.dir, "garboardconfig"), data: access, mode: secretMode})
	about = append(about, "your access to the cluster, valid until "+until.Format(time.DateOnly))
	if err := g.write(outputs...); err != nil {
		return err
	}
	if completed {
		fmt.Fprintf(out, "endpoint is %s\n", endpoint)
	}
	fmt.Fprintln(out, "wrote")
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	for i, o := range outputs {
		fmt.Fprintf(t, "  %s\t%s\n", o.path, about[i])
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if o.options.InstallDisk == "" && len(slices.Concat(o.patches.all, o.patches.controlPlanes, o.patches.workers)) == 0 {
		fmt.Fprintln(out, "machine.install.disk isn't set: machines need it, containers don't")
	}
	fmt.Fprintf(out, nextSteps, shellWord(filepath.Join(o.dir, "init.yaml")), shellWord(filepath.Join(o.dir, "garboardconfig")))
	return nil
}

const nextSteps = `The files contain the secrets of the cluster: protect them like private keys.
next: boot a machine, apply its configuration, and check its health
  gbctl apply-config --insecure -n ADDRESS -f %s
  export GARBOARDCONFIG=%s
  gbctl -n ADDRESS health
`

// clusterSecrets returns the secrets from --with-secrets, or new ones.
func (g *generator) clusterSecrets(o *configFlags) (*config.Secrets, error) {
	switch {
	case o.withSecrets == "" && o.compat == "":
		return config.NewSecrets(g.now())
	case o.withSecrets == "":
		return config.NewRSASecrets(g.now())
	}
	data, err := readInput(o.withSecrets)
	if err != nil {
		return nil, err
	}
	s, err := config.LoadSecrets(o.withSecrets, data)
	if err != nil {
		return nil, &exitError{codeRefused, err}
	}
	if o.compat == "" {
		return s, nil
	}
	for _, ca := range []struct {
		path string
		pair config.CertKey
	}{{"cluster.ca", s.KubernetesCA}, {"cluster.etcd.ca", s.EtcdCA}} {
		if cert, err := pki.ParseCert(ca.pair.Crt); err == nil && cert.PublicKeyAlgorithm != x509.RSA {
			return nil, exitf(codeRefused, "%s: %s is %s; --compat=%s needs RSA", o.withSecrets, ca.path, cert.PublicKeyAlgorithm, compatSelfHosted)
		}
	}
	return s, nil
}

// documents returns the configurations of the nodes, with a description of each.
func (o *configFlags) documents() (outputs []output, about []string, err error) {
	worker := "worker.yaml"
	if o.compat == compatSelfHosted {
		worker = "join.yaml"
	}
	for _, d := range []struct {
		file, about string
		typ         config.MachineType
	}{
		{"init.yaml", "for the first control plane, which forms the cluster", config.Init},
		{"controlplane.yaml", "for all other control planes", config.ControlPlane},
		{worker, "for workers", config.Worker},
	} {
		text, err := o.document(d.file, d.typ)
		if err != nil {
			return nil, nil, err
		}
		outputs = append(outputs, output{path: filepath.Join(o.dir, d.file), data: text, mode: secretMode})
		about = append(about, d.about)
	}
	return outputs, about, nil
}

func (o *configFlags) document(file string, typ config.MachineType) ([]byte, error) {
	o.options.Type = typ
	c, err := config.Generate(o.options)
	if err != nil {
		return nil, &exitError{codeRefused, err}
	}
	text, err := c.Encode()
	if err != nil {
		return nil, err
	}
	own := o.patches.workers
	if typ.ControlPlane() {
		own = o.patches.controlPlanes
	}
	patched := text
	patches, err := patchTexts(slices.Concat(o.patches.all, own), readInput)
	for i := 0; err == nil && i < len(patches); i++ {
		patched, err = patch.Apply(patched, patches[i])
	}
	if err != nil {
		return nil, exitf(codeRefused, "%s: %w", file, err)
	}
	if !bytes.Equal(text, patched) {
		c, _, err := config.Load(file+", patched", patched)
		if err == nil {
			err = config.CheckManifests(file+", patched", patched, c, nil)
		}
		if err != nil {
			return nil, &exitError{codeRefused, err}
		}
	}
	if o.compat == compatSelfHosted {
		return selfHosted(patched, typ)
	}
	return patched, nil
}

// selfHosted converts a checked document to the older format.
func selfHosted(text []byte, typ config.MachineType) ([]byte, error) {
	if typ.ControlPlane() {
		return patch.Apply(text, []byte(`[{op: remove, path: /cluster/aggregatorCA}, {op: remove, path: /cluster/serviceAccount}]`))
	}
	return patch.Apply(text, []byte(`[{op: replace, path: /machine/type, value: join}]`))
}

// nodePatches are the flags with patches for nodes that don't exist yet.
type nodePatches struct{ all, controlPlanes, workers []string }

func (p *nodePatches) add(f *pflag.FlagSet) {
	f.StringArrayVar(&p.all, "config-patch", nil, "patch for all nodes, or @FILE; repeatable")
	f.StringArrayVar(&p.controlPlanes, "config-patch-control-plane", nil, "patch for control planes, or @FILE; repeatable")
	f.StringArrayVar(&p.workers, "config-patch-worker", nil, "patch for workers, or @FILE; repeatable")
}

// patchTexts are the texts of patches, in their order.
func patchTexts(patches []string, read func(path string) ([]byte, error)) (texts [][]byte, err error) {
	for _, p := range patches {
		text, err := patchText(p, read)
		if err != nil {
			return nil, err
		}
		texts = append(texts, text)
	}
	return texts, nil
}

// patchText is the text of a patch that is given as text or @FILE.
func patchText(p string, read func(path string) ([]byte, error)) ([]byte, error) {
	if path, ok := strings.CutPrefix(p, "@"); ok {
		return read(path)
	}
	if _, err := os.Stat(p); err == nil {
		return nil, usagef("%s is a file: type -p @%[1]s", shellWord(p))
	}
	return []byte(p), nil
}

// mirrorsVar adds a flag with mirrors of registries, by registry.
func mirrorsVar(f *pflag.FlagSet, to *map[string][]string, usage string) {
	*to = map[string][]string{}
	f.Func("registry-mirror", "HOST=URL: "+usage+"; repeatable", func(value string) error {
		host, url, ok := strings.Cut(value, "=")
		if !ok || host == "" || url == "" {
			return usagef("must be HOST=URL, such as docker.io=http://10.5.0.1:5000")
		}
		(*to)[host] = append((*to)[host], url)
		return nil
	})
}

// adminConfig makes a client configuration with one context, for an administrator. The
// endpoint is the host of the Kubernetes API: a name that points to all control
// planes also works for their machine API.
func adminConfig(cluster, host string, ca pki.CA, now time.Time) (text []byte, until time.Time, err error) {
	crt, key, err := ca.Issue(pki.Leaf{CN: "admin", Orgs: []string{string(api.Admin)}, Client: true, Now: now})
	if err != nil {
		return nil, until, err
	}
	cert, err := pki.ParseCert(crt)
	if err != nil {
		return nil, until, err
	}
	encode := base64.StdEncoding.EncodeToString
	c := &client.Config{Context: cluster, Contexts: map[string]*client.Context{
		cluster: {Endpoints: []string{host}, CA: encode(ca.Cert), Crt: encode(crt), Key: encode(key)},
	}}
	text, err = c.Encode()
	return text, cert.NotAfter, err
}
