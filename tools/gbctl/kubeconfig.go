package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/types/known/durationpb"
)

func (a *app) kubeconfigCommand() *cobra.Command {
	var force bool
	var ttl time.Duration
	who := &apiv1.KubeconfigRequest{}
	cmd := command("kubeconfig [FILE|-]", func(cmd *cobra.Command, args []string) error {
		to := strings.Join(args, "") // at most one
		if info, err := os.Stat(to); err == nil && info.IsDir() {
			return didYouMean(to+" is a directory", a.instead(to, filepath.Join(to, "admin.kubeconfig")))
		}
		if cmd.Flags().Changed("ttl") {
			who.Ttl = durationpb.New(ttl)
		}
		return a.kubeconfig(cmd.Context(), who, to, force)
	})
	f := cmd.Flags()
	f.BoolVar(&force, "force", false, "replace entries of another cluster with the same name")
	renamed(cmd, "f", "f", "force")
	f.StringVar(&who.User, "user", "", "name of the user in Kubernetes (default admin)")
	f.StringArrayVar(&who.Groups, "group", nil, "group of the user, repeatable (default garboard:administrators, and without --user system:masters)")
	f.DurationVar(&ttl, "ttl", 0, "how long the access lasts, a minute to a year (default 24h, and without --user and --group a year)")
	return cmd
}

func (a *app) kubeconfig(ctx context.Context, who *apiv1.KubeconfigRequest, to string, force bool) error {
	text, err := a.fetchKubeconfig(ctx, who)
	if err != nil {
		return err
	}
	cert, err := checkKubeconfig(text, who)
	if err != nil {
		return fmt.Errorf("the node's kubeconfig: %w; nothing was changed", err)
	}
	ends := fmt.Sprintf("%s (%s) has access until %s; the certificate can't be revoked", cert.Subject.CommonName, strings.Join(cert.Subject.Organization, ", "), stamp(cert.NotAfter))
	m := merging{via: a.loaded.Via, dial: dialServer, force: force}
	if to == "-" {
		if text, err = m.merge(nil, text); err == nil {
			_, err = a.out.Write(text)
		}
		fmt.Fprintln(a.notes(), visible(ends))
		return err
	}
	if to == "" {
		if to, err = defaultKubeconfig(); err != nil {
			return err
		}
	}
	if err := m.into(to, text); err != nil {
		return err
	}
	if m.unreached != nil {
		fmt.Fprintf(a.out, "merged into %s as %q; kubectl's context stays %q, because %s can't be reached from here: %v\n"+
			"once it can: kubectl config use-context %s\n%s\n", to, m.context, m.current, m.server, m.unreached, shellWord(m.context), visible(ends))
		return nil
	}
	fmt.Fprintf(a.out, "merged into %s; kubectl's context is %q now\n%s\n", to, m.context, visible(ends))
	return nil
}

// dialServer is why the server of a kubeconfig takes no connections.
func dialServer(server string) error {
	u, err := url.Parse(server)
	if err != nil {
		return err
	}
	conn, err := net.DialTimeout("tcp", net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")), probeTimeout)
	if err == nil {
		err = conn.Close()
	}
	return err
}

// fetchKubeconfig asks one node after another: any control plane can answer, and some
// nodes may be workers.
func (a *app) fetchKubeconfig(ctx context.Context, who *apiv1.KubeconfigRequest) ([]byte, error) {
	nodes, err := a.targets(ctx)
	if err != nil {
		return nil, err
	}
	var text []byte
	errs := make([]error, len(nodes))
	for i, node := range nodes {
		errs[i] = a.withClient(ctx, node, a.limited(func(ctx context.Context, n *client.Client) error {
			m, err := client.Unary(ctx, n.Access.Kubeconfig, who)
			if err == nil {
				text = m.Kubeconfig
			}
			return err
		}))
		if errs[i] == nil || ctx.Err() != nil {
			return text, errs[i]
		}
	}
	return nil, collect(nodes, errs)
}

func defaultKubeconfig() (string, error) {
	for _, file := range filepath.SplitList(os.Getenv("KUBECONFIG")) {
		if file != "" { // kubectl skips them, too
			return file, nil
		}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find the kubeconfig: %w; set $KUBECONFIG", err)
	}
	return filepath.Join(home, ".kube", "config"), nil
}

// merging puts a cluster into a kubeconfig.
type merging struct {
	via   map[string]string         // of the client's context: where HOST:PORT of the server is forwarded from
	dial  func(server string) error // why kubectl can't reach a server; nil: it can
	renew bool                      // entries that are there, and nothing else
	force bool                      // entries with the same names give way
	local bool                      // they do if they are of a cluster on this machine

	context, server string // of the cluster in the result
	current         string // the context of the result
	unreached       error  // why context isn't the current one
}

var errNotThere = errors.New("the cluster isn't there")

// loopbackPrefix starts the addresses of development clusters, and of no others.
const loopbackPrefix = "127.0.0.1:"

// into merges text into a file, which needn't exist.
func (m *merging) into(path string, text []byte) error {
	old, err := os.ReadFile(path)
	switch {
	case m.renew && errors.Is(err, fs.ErrPermission): // the file may be another user's
		return errNotThere
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	merged, err := m.merge(old, text)
	if err != nil {
		return fmt.Errorf("merge into %s: %w; nothing was changed", path, err)
	}
	return writeKubeconfig(path, merged)
}

// kubeFile is a kubeconfig as a tree, so that unknown fields and comments stay.
type kubeFile struct {
	root *yaml.Node
	// flush: lists are in the same column as their keys, as kubectl writes them.
	flush bool
}

func parseKube(text []byte) (kubeFile, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return kubeFile{}, err
	}
	if len(doc.Content) == 0 {
		return kubeFile{root: mapping("apiVersion", "v1", "kind", "Config")}, nil
	}
	if doc.Content[0].Kind != yaml.MappingNode {
		return kubeFile{}, errors.New("not a kubeconfig: no mapping at the top")
	}
	k := kubeFile{root: doc.Content[0]}
	for _, name := range []string{"clusters", "users", "contexts"} {
		if l := get(k.root, name); l != nil && l.Style&yaml.FlowStyle == 0 && len(l.Content) > 0 && l.Column == k.root.Column {
			k.flush = true
		}
	}
	return k, nil
}

// indent is that of kubectl for mappings.
const indent = 2

// encode writes the file with its lists indented as before, so that unrelated entries
// don't change.
func (k kubeFile) encode() ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(indent)
	if k.flush {
		enc.CompactSeqIndent()
	}
	err := errors.Join(enc.Encode(k.root), enc.Close())
	return b.Bytes(), err
}

// checkKubeconfig refuses all fields that AdminKubeconfig doesn't set: kubectl runs programs
// and reads files that a kubeconfig names, and an attacker may control the node. It returns
// the certificate. A node of an earlier release doesn't know for whom it should be, and makes
// one of the first administrator.
func checkKubeconfig(text []byte, who *apiv1.KubeconfigRequest) (*x509.Certificate, error) {
	var file config.Kubeconfig
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); err != nil {
		return nil, err
	}
	if len(file.Users) != 1 {
		return nil, fmt.Errorf("it has %s, not one", plural(len(file.Users), "user"))
	}
	crt, err := base64.StdEncoding.DecodeString(file.Users[0].User.Crt)
	if err != nil {
		return nil, err
	}
	cert, err := pki.ParseCert(crt)
	if err != nil {
		return nil, err
	}
	is, groups := cert.Subject, who.GetGroups()
	if len(groups) == 0 && who.GetUser() != "" {
		groups = []string{config.AdministratorsGroup}
	}
	if who.GetUser() != "" && is.CommonName != who.User || len(groups) > 0 && !slices.Equal(slices.Sorted(slices.Values(is.Organization)), slices.Sorted(slices.Values(groups))) ||
		who.GetTtl() != nil && time.Until(cert.NotAfter) > who.Ttl.AsDuration()+pki.ClockSkew {
		return nil, fmt.Errorf("it is for %s (%s) until %s: the node runs a release that doesn't know --user, --group and --ttl", is.CommonName, strings.Join(is.Organization, ", "), stamp(cert.NotAfter))
	}
	return cert, nil
}

// get returns the value of a key of a mapping, or nil.
func get(n *yaml.Node, key string) *yaml.Node {
	for i := 0; n != nil && n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

func set(n *yaml.Node, key string, value any) {
	if old := get(n, key); old != nil {
		*old = *scalar(value)
		return
	}
	n.Content = append(n.Content, scalar(key), scalar(value))
}

func text(n *yaml.Node, key string) string {
	if v := get(n, key); v != nil {
		return v.Value
	}
	return ""
}

// entry returns the entry with a name in a list ("clusters", "users", "contexts"), or
// nil.
func (k kubeFile) entry(list, name string) *yaml.Node {
	if l := get(k.root, list); l != nil {
		for _, e := range l.Content {
			if text(e, "name") == name {
				return e
			}
		}
	}
	return nil
}

// put adds an entry, or replaces the one with the same name.
func (k kubeFile) put(list string, e *yaml.Node) {
	if old := k.entry(list, text(e, "name")); old != nil {
		*old = *e
		return
	}
	l := get(k.root, list)
	if l == nil || l.Kind != yaml.SequenceNode {
		set(k.root, list, sequence([]*yaml.Node{}))
		l = get(k.root, list)
	}
	l.Style = 0 // an empty one is often written []
	l.Content = append(l.Content, e)
}

// namesFree reports whether the three names of a context are unused, or used by the same
// cluster.
func (k kubeFile) namesFree(cluster *yaml.Node, clusterName, user, context string) bool {
	there := k.entry("clusters", clusterName)
	if there == nil {
		return k.entry("users", user) == nil && k.entry("contexts", context) == nil
	}
	if c := get(k.entry("contexts", context), "context"); c != nil && (text(c, "cluster") != clusterName || text(c, "user") != user) {
		return false
	}
	ours, theirs := get(cluster, "cluster"), get(there, "cluster")
	return text(ours, "server") == text(theirs, "server") && text(ours, "certificate-authority-data") == text(theirs, "certificate-authority-data")
}

// twin returns the entry of the same cluster, which has the same authority: that with the same server if there are
// several.
func (k kubeFile) twin(cluster *yaml.Node) (twin *yaml.Node) {
	l, ours := get(k.root, "clusters"), get(cluster, "cluster")
	for i := 0; l != nil && i < len(l.Content); i++ {
		theirs := get(l.Content[i], "cluster")
		if ca := text(theirs, "certificate-authority-data"); ca == "" || ca != text(ours, "certificate-authority-data") {
			continue
		}
		if twin = l.Content[i]; text(theirs, "server") == text(ours, "server") {
			break
		}
	}
	return twin
}

// merge copies the current context of one kubeconfig, with its cluster and user, into another
// one, and makes it the current context there. Where the same cluster is there with another
// server, this one stays unless kubectl can reach the new one. A cluster that can't be reached
// doesn't become the current context in the place of another one.
func (m *merging) merge(old, add []byte) (merged []byte, err error) {
	to, err := parseKube(old)
	if err != nil {
		return nil, err
	}
	from, err := parseKube(add)
	if err != nil {
		return nil, fmt.Errorf("the node's kubeconfig: %w", err)
	}
	entry := from.entry("contexts", text(from.root, "current-context"))
	context := get(entry, "context")
	cluster, user := from.entry("clusters", text(context, "cluster")), from.entry("users", text(context, "user"))
	if cluster == nil || user == nil {
		return nil, errors.New("the node's kubeconfig has no current context")
	}
	names := [3]string{text(cluster, "name"), text(user, "name"), text(entry, "name")}
	m.server = text(get(cluster, "cluster"), "server")
	if via := m.via[strings.TrimPrefix(m.server, "https://")]; via != "" {
		host, _, _ := net.SplitHostPort(strings.TrimPrefix(m.server, "https://"))
		m.server = "https://" + via
		set(get(cluster, "cluster"), "server", m.server)
		set(get(cluster, "cluster"), "tls-server-name", host)
	}
	there := text(get(to.entry("clusters", names[0]), "cluster"), "server")
	if m.renew && there != m.server {
		return nil, errNotThere
	}
	force := m.force || m.renew || m.local && strings.HasPrefix(there, "https://"+loopbackPrefix)
	if twin := to.twin(cluster); twin != nil && m.dial != nil && !force {
		for i, name := range names { // USER@CLUSTER
			names[i] = strings.TrimSuffix(name, text(cluster, "name")) + text(twin, "name")
		}
		if there := text(get(twin, "cluster"), "server"); there != m.server && m.dial(m.server) != nil {
			m.server, cluster = there, twin
		}
		force = true
	}
	taken := names
	for i := 1; !force && !to.namesFree(cluster, taken[0], taken[1], taken[2]); i++ {
		for j := range names {
			taken[j] = fmt.Sprintf("%s-%d", names[j], i)
		}
	}
	m.context, m.current = taken[2], text(to.root, "current-context")
	set(cluster, "name", taken[0])
	set(user, "name", taken[1])
	set(entry, "name", taken[2])
	set(context, "cluster", taken[0])
	set(context, "user", taken[1])
	if namespace := text(get(to.entry("contexts", taken[2]), "context"), "namespace"); namespace != "" {
		set(context, "namespace", namespace)
	}
	to.put("clusters", cluster)
	to.put("contexts", entry)
	if m.current != "" && m.current != m.context && m.dial != nil {
		m.unreached = m.dial(m.server)
	}
	if m.unreached == nil && !m.renew {
		m.current = m.context
	}
	set(to.root, "current-context", m.current)
	to.put("users", user)
	return to.encode()
}

// writeKubeconfig replaces the file. If the path is a symbolic link, it replaces the
// target.
func writeKubeconfig(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	return boot.WriteFile(path, data, 0o600)
}
