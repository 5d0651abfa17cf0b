package config

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
)

// leaves lists the paths of all fields of the schema, in order.
func leaves(t reflect.Type, path string) []string {
	inner, suffix := element(t)
	if inner == nil {
		return []string{path}
	}
	if path += suffix; path != "" {
		path += "."
	}
	var all []string
	for i := range inner.NumField() {
		all = append(all, leaves(inner.Field(i).Type, path+inner.Field(i).Tag.Get("yaml"))...)
	}
	return all
}

// every field has a row, every row has a field, and the order is that of the schema.
func TestQ10EveryFieldHasAnEffect(t *testing.T) {
	var inOrder struct{ Effects yaml.Node }
	if err := yaml.Unmarshal(fieldsText, &inOrder); err != nil {
		t.Fatal(err)
	}
	var rows, used []string
	names := map[*applyRow]string{}
	for pair := range slices.Chunk(inOrder.Effects.Content, 2) {
		rows = append(rows, pair[0].Value)
		names[tables().Effects[pair[0].Value]] = pair[0].Value
	}
	for _, field := range leaves(reflect.TypeFor[Config](), "") {
		if row := rowOf(field); row == nil {
			t.Errorf("%s has no row", field)
		} else {
			used = append(used, names[row])
		}
	}
	if diff := cmp.Diff(slices.Compact(used), rows); diff != "" {
		t.Errorf("rows of the fields (-) and the table (+):\n%s", diff)
	}
}

// All that is in the file is read, and each comment is that of a field.
func TestTablesOfFields(t *testing.T) {
	all := tables()
	dec := yaml.NewDecoder(bytes.NewReader(fieldsText))
	dec.KnownFields(true)
	if err := dec.Decode(&all); err != nil {
		t.Error(err)
	}
	known := map[string]bool{}
	for _, path := range leaves(reflect.TypeFor[Config](), "") {
		for parts := strings.Split(path, "."); len(parts) > 0; parts = parts[:len(parts)-1] {
			known[strings.TrimSuffix(strings.Join(parts, "."), "[]")] = true
		}
	}
	for path := range tables().Comments {
		if !known[path] {
			t.Errorf("there is no field %s", path)
		}
	}
}

// Each rule is that of a field, can be applied to it, and says what is wrong. No text shows a secret.
func TestRulesOfValues(t *testing.T) {
	fields, _ := schema()
	// A policy is text in the schema.
	policy := leaves(reflect.TypeFor[auditPolicy](), "cluster.apiServer.auditPolicy")
	policy = append(policy, "cluster.apiServer.auditPolicy.rules")
	want(t, Version, strings.Join(tables().Values["version"].Choices, " "))
	for path, rule := range tables().Values {
		field, known := fields[strings.TrimSuffix(path, "[]")]
		if !known && !slices.Contains(policy, strings.TrimSuffix(path, "[]")) {
			t.Errorf("there is no field %s", path)
		}
		if rule.Form != "" && valueForms[rule.Form] == nil {
			t.Errorf("%s: there is no form %q", path, rule.Form)
		}
		if (rule.Like.Regexp != nil || rule.Max != 0) && rule.Must == "" {
			t.Errorf("%s has no text", path)
		}
		if reflect.DeepEqual(*rule, valueRule{}) {
			t.Errorf("%s: the rule says nothing", path)
		}
		if (field.Type == secretType || field.Type == keyType) && strings.Contains(rule.Must+rule.Twice, "%v") {
			t.Errorf("%s: the text shows a secret", path)
		}
	}
}

func TestEffectsAreKnown(t *testing.T) {
	for path, row := range tables().Effects {
		id, isService := row.Effect.Service()
		if row.Effect != Live && row.Effect != Reboot && (!isService || !slices.Contains(restarted, id)) {
			t.Errorf("%s has the effect %q", path, row.Effect)
		}
		if row.Refine != "" && refinements[row.Refine] == nil {
			t.Errorf("%s: there is no %s", path, row.Refine)
		}
	}
}

func TestEffectsMildestFirst(t *testing.T) {
	changes := []Change{{Effect: Reboot}, {Effect: Restart("containerd")}, {Effect: Live}, {Effect: Restart("kubelet")}, {Effect: Restart("etcd")}, {Effect: Live}, {Effect: Reboot}}
	want(t, "[live service:kubelet service:etcd service:containerd reboot]", fmt.Sprint(Effects(changes)))
	if effects := Effects(nil); effects != nil {
		t.Error(effects)
	}
}

// changes returns what Diff finds between two documents, one change per line.
func changes(t *testing.T, old, new string) string {
	t.Helper()
	a, _ := accepted(t, old)
	b, _ := accepted(t, new)
	var lines []string
	for _, c := range Diff(a, b) {
		lines = append(lines, c.String())
	}
	return strings.Join(lines, "\n")
}

func TestDiff(t *testing.T) {
	control, worker := document(t, ControlPlane), document(t, Worker)
	for _, tt := range []struct{ doc, section, old, new, want string }{
		// defaults written out
		{control, "machine", "time: {servers: [pool.ntp.org], bootTimeout: 30s}", "sysctls: {}", ""},
		{control, "machine", "time: {}", "time: {servers: [a.example.org, 10.0.0.1]}", "machine.time.servers: pool.ntp.org → a.example.org, 10.0.0.1 (live)"},
		{control, "machine", "network: {hostname: one}", "network: {hostname: two}", "machine.network.hostname: one → two (service:kubelet: the node registers under its new name)"},
		{control, "machine", "sysctls: {vm.max_map_count: 1, vm.swappiness: 2}", "sysctls: {vm.max_map_count: 3, kernel.pid_max: 4}",
			"machine.sysctls[\"kernel.pid_max\"]: added 4 (live)\nmachine.sysctls[\"vm.max_map_count\"]: 1 → 3 (live)\nmachine.sysctls[\"vm.swappiness\"]: removed 2 (live)"},
		{control, "machine", "env: {a: b}", "env: {a: b, http_proxy: 'http://me:hunter2@proxy:3128'}", "machine.env.http_proxy: added http://me:xxxxx@proxy:3128 (service:containerd)"},
		{worker, "machine", "kubelet: {nodeTaints: {a: NoSchedule, b: 'x:NoExecute'}}", "kubelet: {nodeTaints: {a: 'y:NoSchedule', b: 'x:NoExecute'}}", "machine.kubelet.nodeTaints.a: NoSchedule → y:NoSchedule (live)"},
		{worker, "machine", "kubelet: {persist: [cni]}", "kubelet: {persist: [cni, volumePlugins]}", "machine.kubelet.persist: cni → cni, volumePlugins (live: used at the next boot)"},
		// Interfaces are identified by name, not by their place in the list.
		{control, "machine", "network: {interfaces: [{interface: eth0, dhcp: true}, {interface: eth1, cidr: 10.0.0.1/8}]}", "network: {interfaces: [{interface: eth2, dhcp: true}, {interface: eth1, cidr: 10.0.0.2/8, mtu: 9000}]}",
			"machine.network.interfaces[eth2].dhcp: added true (live)\nmachine.network.interfaces[eth1].cidr: 10.0.0.1/8 → 10.0.0.2/8 (live)\nmachine.network.interfaces[eth1].mtu: added 9000 (live)\nmachine.network.interfaces[eth0].dhcp: removed true (live)"},
		{control, "machine", "network: {interfaces: [{interface: eth0}, {interface: eth1}]}", "network: {interfaces: [{interface: eth1}, {interface: eth0}]}",
			"machine.network.interfaces: eth0, eth1 → eth1, eth0 (live)"},
		{control, "machine", "network: {interfaces: [{interface: eth0}, {interface: eth0, cidr: 10.0.0.1/8}]}", "network: {interfaces: [{interface: eth0}, {interface: eth0, cidr: 10.0.0.2/8}]}",
			"machine.network.interfaces[\"eth0#2\"].cidr: 10.0.0.1/8 → 10.0.0.2/8 (live)"},
		// Or by what selects them.
		{control, "machine", "network: {interfaces: [{hardwareAddr: '02:ab:12:34:00:01', mtu: 1400}, {hardwareAddr: '02:ab:12:34:00:02', mtu: 1400}]}", "network: {interfaces: [{hardwareAddr: '02:ab:12:34:00:02', mtu: 9000}, {driver: igb}]}",
			"machine.network.interfaces[\"02:ab:12:34:00:02\"].mtu: 1400 → 9000 (live)\nmachine.network.interfaces[igb].driver: added igb (live)\n" +
				"machine.network.interfaces[\"02:ab:12:34:00:01\"].hardwareAddr: removed 02:ab:12:34:00:01 (live)\nmachine.network.interfaces[\"02:ab:12:34:00:01\"].mtu: removed 1400 (live)"},
		{control, "machine", "network: {}", "network: {interfaces: [{interface: eth5}]}", "machine.network.interfaces[eth5].interface: added eth5 (live)"},
		{control, "machine", "network: {interfaces: [{interface: eth0, vlans: [{vlanId: 5, mtu: 1400}]}]}", "network: {interfaces: [{interface: eth0, vip: {ip: 10.0.0.9}, vlans: [{vlanId: 5}]}]}",
			"machine.network.interfaces[eth0].vlans[5].mtu: removed 1400 (live)\nmachine.network.interfaces[eth0].vip.ip: added 10.0.0.9 (live)"},
		// Containerd reads its drop-ins only when it starts.
		{control, "machine", "files: [{path: /etc/a, public: true, content: x}]", "files: [{path: /etc/a, public: true, content: y}]", `machine.files["/etc/a"].content: x → y (live: programs that read it only at their start need a restart)`},
		{control, "machine", "files: [{path: /var/cri/conf.d/a.toml, public: true, content: x}]", "files: [{path: /var/cri/conf.d/a.toml, public: true, content: y}]", `machine.files["/var/cri/conf.d/a.toml"].content: x → y (service:containerd: containerd reads it at its start)`},
		// And the authorities that it trusts.
		{control, "machine", "files: [{path: /etc/ssl/certs/ca-certificates, op: append, public: true, content: x}]", "files: [{path: /etc/ssl/certs/ca-certificates, op: append, public: true, content: y}]",
			`machine.files["/etc/ssl/certs/ca-certificates"].content: x → y (service:containerd: containerd reads it at its start)`},
		{control, "machine", "files: [{path: /etc/ssl/certs/ca-certificates.crt, op: append, public: true, content: x}]", "files: [{path: /etc/ssl/certs/ca-certificates.crt, op: append, public: true, content: y}]",
			`machine.files["/etc/ssl/certs/ca-certificates.crt"].content: x → y (service:containerd: containerd reads it at its start)`},
		{control, "machine", "files: [{path: /etc/a, content: x}]", "files: [{path: /etc/a, content: y}]", `machine.files["/etc/a"].content: (secret) → (secret) (live: programs that read it only at their start need a restart)`},
		{control, "machine", "env: {a: b, DBPASS: x}", "env: {a: b, DBPASS: y}", "machine.env.DBPASS: (secret) → (secret) (service:containerd)"},
		{control, "machine", "files: []", "files: [{path: /etc/a, content: hunter2, permissions: 0600}]",
			"machine.files[\"/etc/a\"].content: added (secret) (live: programs that read it only at their start need a restart)\nmachine.files[\"/etc/a\"].permissions: added 0600 (live)\n" +
				"machine.files[\"/etc/a\"].op: added create (live)"},
		{control, "machine", "systemDiskEncryption: {ephemeral: {keys: [{slot: 0, nodeID: {}}, {slot: 1, static: {passphrase: a}}]}}", "systemDiskEncryption: {ephemeral: {keys: [{slot: 1, static: {passphrase: hunter2}}, {slot: 0, nodeID: {}}]}}",
			"machine.systemDiskEncryption.ephemeral.keys[1].static.passphrase: (secret) → (secret) (reboot: a partition with content is neither encrypted nor decrypted until a reset wipes it)"},
		// Without a key that stays, the partition wouldn't open.
		{control, "machine", "systemDiskEncryption: {state: {keys: [{slot: 0, nodeID: {}}]}, ephemeral: {keys: [{slot: 1, static: {passphrase: a}}]}}", "systemDiskEncryption: {state: {keys: [{slot: 0, nodeID: {}}]}, ephemeral: {keys: [{slot: 1, static: {passphrase: b}}]}}",
			"machine.systemDiskEncryption.ephemeral.keys[1].static.passphrase: (secret) → (secret) (reboot: no key of a partition stays, so the node can't open it unless a reset wipes it: add the new key first, and remove the old one with a further change)"},
		{control, "machine", "systemDiskEncryption: {ephemeral: {keys: [{slot: 0, nodeID: {}}, {slot: 1, nodeID: {}}]}}", "systemDiskEncryption: {ephemeral: {keys: [{slot: 1, nodeID: {}}, {slot: 0, nodeID: {}}]}}", ""},
		{control, "machine", dataDisk("{slot: 0, nodeID: {}}, {slot: 1, static: {passphrase: a}}"), dataDisk("{slot: 0, nodeID: {}}"),
			`machine.disks[data].partitions["/var/mnt/data"].encryption.keys[1].static.passphrase: removed (secret) (live: used at the next boot; a partition with content is neither encrypted nor decrypted until its disk is wiped)`},
		{control, "machine", dataDisk("{slot: 1, static: {passphrase: a}}"), dataDisk("{slot: 1, static: {passphrase: b}}"),
			`machine.disks[data].partitions["/var/mnt/data"].encryption.keys[1].static.passphrase: (secret) → (secret) (live: no key of a partition stays, so the node can't open it unless a reset wipes it: add the new key first, and remove the old one with a further change)`},
		{control, "cluster", "scheduler: {extraArgs: {v: 2}}", "scheduler: {extraArgs: {v: ''}}", "cluster.scheduler.extraArgs.v: 2 →  (live: its static pod is replaced)"},
		{control, "cluster", "allowSchedulingOnControlPlanes: false", "allowSchedulingOnControlPlanes: true", "cluster.allowSchedulingOnControlPlanes: added true (live)"},
		{control, "cluster", "proxy: {mode: nftables}", "proxy: {mode: ipvs}", "cluster.proxy.mode: nftables → ipvs (live: created in the cluster if missing, never changed there)"},
		{worker, "cluster", "proxy: {mode: nftables}", "proxy: {mode: ipvs}", "cluster.proxy.mode: nftables → ipvs (live: for control planes only)"},
		{worker, "cluster", "etcd: {extraArgs: {a: b}}", "etcd: {extraArgs: {a: c}}", "cluster.etcd.extraArgs.a: b → c (live: for control planes only)"},
		{control, "cluster", "clusterName: one", "clusterName: two", "cluster.clusterName: one → two (reboot)"},
	} {
		t.Run(tt.new, func(t *testing.T) {
			key, _, _ := strings.Cut(tt.new, ":")
			doc := without(tt.doc, tt.section, key)
			want(t, tt.want, changes(t, with(doc, tt.section, tt.old), with(doc, tt.section, tt.new)))
		})
	}
}

// without is a document without a whole section's key.
func without(doc, section, key string) string {
	var out []string
	in, skip := "", false
	for line := range strings.Lines(doc) {
		if line[0] != ' ' && line[0] != '#' {
			in = strings.TrimRight(line, ":\n")
		}
		if strings.HasPrefix(line, "  ") && line[2] != ' ' {
			skip = in == section && strings.HasPrefix(line, "  "+key+":")
		} else if line[0] != ' ' {
			skip = false
		}
		if !skip {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}

func TestDiffOfType(t *testing.T) {
	got := changes(t, document(t, ControlPlane), strings.Replace(document(t, ControlPlane), "type: controlplane", "type: init", 1))
	want(t, "machine.type: controlplane → init (reboot)", got)
}

// An added authority needs no reboot, and neither does its removal, which takes that back; a
// changed one does.
func TestDiffOfAuthorities(t *testing.T) {
	a, _ := accepted(t, document(t, ControlPlane))
	b := *a
	b.Cluster.AggregatorCA = a.Cluster.CA
	if effects := Effects(Diff(a, &b)); !slices.Equal(effects, []Effect{Reboot}) {
		t.Error(effects)
	}
	none := *a
	none.Cluster.AggregatorCA = CertKey{}
	for _, c := range slices.Concat(Diff(&none, a), Diff(a, &none)) {
		want(t, "live: its static pod is replaced", string(c.Effect)+": "+c.Note)
	}
}

func TestDiffOfNothing(t *testing.T) {
	c, _, problems := load(t, full(t))
	if problems != nil {
		t.Fatal(problems)
	}
	if got := Diff(c, c); len(got) > 0 {
		t.Error(got)
	}
	added := Diff(nil, c)
	removed := Diff(c, nil)
	if len(added) == 0 || len(removed) != len(added) {
		t.Errorf("%d fields come, %d go", len(added), len(removed))
	}
	for i, op := range []Op{Added, Removed} {
		for _, change := range [][]Change{added, removed}[i] {
			if change.Op != op {
				t.Errorf("%s", change)
			}
		}
	}
}

// The removal of any single field is a change.
func TestDiffSeesEveryField(t *testing.T) {
	c, _, problems := load(t, full(t))
	if problems != nil {
		t.Fatal(problems)
	}
	before, _, _ := load(t, full(t))
	seen := 0
	eachLeaf(reflect.ValueOf(c).Elem(), "", func(path string, without func() (restore func())) {
		restore := without()
		if len(Diff(before, c)) == 0 || len(Diff(c, before)) == 0 {
			t.Errorf("%s went without a change", path)
		}
		restore()
		seen++
	})
	if seen < len(tables().Effects) {
		t.Errorf("tried %d fields of %d", seen, len(tables().Effects))
	}
	if left := Diff(c, c); left != nil {
		t.Error(left)
	}
}

// eachLeaf calls f with a way to zero each field that is set.
func eachLeaf(v reflect.Value, path string, f func(string, func() func())) {
	inner, _ := element(v.Type())
	switch {
	case v.IsZero():
	case inner == nil:
		f(path, func() func() {
			old := reflect.New(v.Type()).Elem()
			old.Set(v)
			v.SetZero()
			return func() { v.Set(old) }
		})
	case v.Kind() == reflect.Pointer:
		eachLeaf(v.Elem(), path, f)
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			eachLeaf(v.Index(i), fmt.Sprintf("%s[%d]", path, i), f)
		}
	case v.Kind() == reflect.Map:
		for _, key := range v.MapKeys() { // the values of a map can't be set in place
			elem := reflect.New(v.Type().Elem()).Elem()
			elem.Set(v.MapIndex(key))
			eachLeaf(elem, path+"."+key.String(), func(path string, without func() func()) {
				f(path, func() func() {
					restore := without()
					v.SetMapIndex(key, elem)
					return func() { restore(); v.SetMapIndex(key, elem) }
				})
			})
		}
	default:
		for i := range v.NumField() {
			eachLeaf(v.Field(i), path+"."+v.Type().Field(i).Tag.Get("yaml"), f)
		}
	}
}

func TestDiffShowsNoSecret(t *testing.T) {
	c, _, problems := load(t, full(t))
	if problems != nil {
		t.Fatal(problems)
	}
	s := testSecrets()
	for i, secret := range []string{string(s.MachineToken), string(s.ClusterSecret), "supersecret", "BEGIN", "LS0t", "bWU6c2VjcmV0", "yAnz5TF"} {
		for _, change := range append(Diff(nil, c), Diff(c, nil)...) {
			if strings.Contains(fmt.Sprint(change), secret) {
				t.Errorf("%s shows secret %d", change.Path, i)
			}
		}
	}
}

// dataDisk is a machine with a disk whose partition has these keys.
func dataDisk(keys string) string {
	return "disks: [{name: data, device: /dev/sdb, partitions: [{mountpoint: /var/mnt/data, encryption: {keys: [" + keys + "]}}]}]"
}
