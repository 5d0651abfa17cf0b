package config

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var testTime = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

// testSecrets are the same for all tests: making them costs milliseconds.
var testSecrets = sync.OnceValue(func() *Secrets {
	s, err := NewSecrets(testTime)
	if err != nil {
		panic(err)
	}
	return s
})

// document is a valid configuration of the given type, without the sections
// that a test adds.
func document(t testing.TB, typ MachineType) string {
	t.Helper()
	c, err := Generate(Options{Type: typ, Endpoint: "https://10.5.0.2:6443", Secrets: testSecrets()})
	if err != nil {
		t.Fatal(err)
	}
	data, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// with adds lines to a section of a document: "machine" or "cluster", or "" for
// the top.
func with(doc, section, lines string) string {
	if section == "" {
		return doc + lines
	}
	indented := "  " + strings.ReplaceAll(strings.TrimRight(lines, "\n"), "\n", "\n  ") + "\n"
	head := section + ":\n"
	return strings.Replace(doc, "\n"+head, "\n"+head+indented, 1)
}

// load loads a document and returns messages with line numbers relative to the
// first added line, so that the tests don't depend on the length of the secrets.
func load(t *testing.T, doc string) (c *Config, warnings, problems []string) {
	t.Helper()
	c, ws, err := Load("test.yaml", []byte(doc))
	for _, w := range ws {
		warnings = append(warnings, w.String())
	}
	if err != nil {
		var ps Problems
		if !errors.As(err, &ps) {
			t.Fatalf("error of type %T: %v", err, err)
		}
		for _, p := range ps {
			problems = append(problems, p.String())
		}
	}
	if (c == nil) != (err != nil) {
		t.Fatalf("config %v with error %v", c != nil, err)
	}
	return c, warnings, problems
}

func TestLoadFillsDefaults(t *testing.T) {
	for _, typ := range []MachineType{Init, ControlPlane, Worker} {
		c, warnings, problems := load(t, document(t, typ))
		if problems != nil || warnings != nil {
			t.Fatal(problems, warnings)
		}
		if c.Machine.Type != typ {
			t.Errorf("type %s", c.Machine.Type)
		}
		for _, path := range defaulted() {
			if strings.Contains(path, "[]") {
				continue // of entries, below
			}
			if fieldAt(t, c, path).IsZero() {
				t.Errorf("%s has no default", path)
			}
		}
		got := fmt.Sprint(c.Machine.Kubelet.ClusterDNS, c.Cluster.Network.PodSubnets, c.Cluster.Network.ServiceSubnets)
		if want := "[10.96.0.10] [10.244.0.0/16] [10.96.0.0/12]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// Each default is that of a field.
func TestDefaultsHaveFields(t *testing.T) {
	c := example(reflect.TypeFor[Config]()).Interface().(Config)
	c.FillDefaults()
	all := leaves(reflect.TypeFor[Config](), "")
	for _, path := range defaulted() {
		if !slices.Contains(all, path) {
			t.Errorf("there is no field %s", path)
		}
	}
	again := c
	again.FillDefaults()
	if !reflect.DeepEqual(c, again) {
		t.Error("a second call changes something")
	}
}

func defaulted() []string {
	return slices.Concat(slices.Collect(maps.Keys(tables().Defaults)), slices.Collect(maps.Keys(images)))
}

// Each default is read without a problem, and those that other code has, too, are the same.
func TestDefaultsAreRead(t *testing.T) {
	fields, _ := schema()
	for path, n := range tables().Defaults {
		d := &decoder{report: &report{}, budget: maxExpanded}
		if d.value(&n, reflect.New(fields[path].Type).Elem()); len(d.problems)+len(d.warnings) > 0 {
			t.Errorf("%s: %v, %v", path, d.problems, d.warnings)
		}
	}
	c := &Config{}
	c.FillDefaults()
	if c.Cluster.ControlPlane.LocalAPIServerPort != DefaultAPIServerPort || c.Cluster.Network.PodSubnets[0] != DefaultPodSubnet ||
		c.Cluster.Network.ServiceSubnets[0] != DefaultServiceSubnet {
		t.Errorf("%d, %s, %s", c.Cluster.ControlPlane.LocalAPIServerPort, c.Cluster.Network.PodSubnets, c.Cluster.Network.ServiceSubnets)
	}
}

func fieldAt(t *testing.T, c *Config, path string) reflect.Value {
	t.Helper()
	v := reflect.ValueOf(c).Elem()
	for _, name := range strings.Split(path, ".") {
		f, ok := fieldByName(v.Type(), name)
		if !ok {
			t.Fatalf("no field %s of %s", name, path)
		}
		v = v.FieldByIndex(f.Index)
	}
	return v
}

// fullMachine and fullCluster use every field of the schema; TestEveryField
// checks that.
const fullMachine = `certSANs: [node.example.org, 10.0.0.9]
network:
  firewall:
    enabled: false
    allowMetadata: true
    nodeNetworks: [10.0.0.0/8, "fd00::/8"]
    rules:
      - {name: admin, action: accept, interface: eth0, protocol: tcp, ports: [50000, 6443-6444], sources: [10.0.0.0/8], destinations: [10.0.0.201/32]}
      - {name: rest, action: drop, protocol: tcp}
  resolver:
    enabled: true
    dnsOverTLS: [{address: 9.9.9.9, name: dns.quad9.net}]
  hostname: one
  autoHostname: stable
  nameservers: [10.0.0.1, "fe80::1%eth0"]
  searchDomains: [example.org]
  extraHostEntries: [{ip: 10.0.0.9, aliases: [registry.example.org, registry]}]
  rules: [{priority: 1000, from: 10.0.0.0/8, to: 172.16.0.0/12, fwMark: 7, table: 100}]
  interfaces:
    - interface: eth0
      hardwareAddr: 02:ab:12:34:00:01
      driver: virtio_*
      busPath: "0000:00:04.0"
      cidr: 10.0.0.201/8
      mtu: 8765
      dhcp6: true
      acceptRA: false
      dhcpOptions: {routeMetric: 50, routeTable: 200, clientIdentifier: one, userClass: two, vendorClassIdentifier: three}
      required: true
      ethernet:
        rings: {rx: 1024, tx: 512}
        channels: {rx: 1, tx: 1, other: 1, combined: 4}
        features: {tx-tcp-segmentation: false}
        wakeOnLan: [magic]
      routes:
        - {network: 0.0.0.0/0, gateway: 10.0.0.1, metric: 7, source: 10.0.0.201, mtu: 1400, table: 100}
        - {network: 10.9.0.0/16, type: blackhole}
      vlans:
        - vlanId: 100
          cidr: "192.168.2.10/28"
          mtu: 1400
          routes:
            - network: 192.168.3.0/24
              gateway: 192.168.2.1
              source: 192.168.2.10
              mtu: 1300
              table: 100
              type: unicast
        - vlanId: 101
          protocol: 802.1ad
          dhcp: true
    - interface: eth1
      ignore: true
    - interface: bond0
      dhcp: true
      vip:
        ip: 192.168.0.15
      bond:
        mode: 802.3ad
        lacpRate: fast
        xmitHashPolicy: layer3+4
        miimon: 100
        updelay: 200
        downdelay: 200
        interfaces: [eth2, eth3]
        minLinks: 1
        adSelect: bandwidth
        adActorSysPrio: 100
        adUserPortKey: 7
        adActorSystem: 02:ab:12:34:00:09
        lpInterval: 2
        resendIgmp: 2
        numPeerNotif: 3
        peerNotifyDelay: 200
        lacpActive: false
        allSlavesActive: true
        useCarrier: false
    - interface: bond1
      dhcp: true
      bond:
        mode: active-backup
        interfaces: [eth6]
        primary: eth6
        primaryReselect: better
        failOverMac: active
        arpInterval: 500
        arpIPTarget: [10.0.0.1]
        arpMissedMax: 3
        arpValidate: active
        arpAllTargets: all
    - interface: bond2
      dhcp: true
      bond: {mode: balance-tlb, interfaces: [eth7], tlbDynamicLb: false}
    - interface: bond3
      dhcp: true
      bond: {interfaces: [eth8], packetsPerSlave: 5}
    - interface: br0
      dhcp: true
      bridge:
        interfaces: [eth4]
        stp: {enabled: true}
        vlan: {vlanFiltering: true}
    - interface: blue
      vrf: {table: 1000, interfaces: [eth5]}
    - interface: m0
      dhcp: true
      macvlan: {interface: eth1, mode: private}
    - interface: veth0
      veth: {peer: veth1}
    - interface: d0
      cidr: 192.168.6.1/32
      dummy: true
    - interface: wg0
      cidr: 192.168.5.1/24
      wireguard:
        privateKey: yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=
        listenPort: 51820
        firewallMark: 7
        peers:
          - allowedIPs: [192.168.88.0/24]
            endpoint: 209.202.254.14:8172
            publicKey: xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=
            presharedKey: FpCyhws9cxwWoV4xELtfJvjJN+zQVRPISllRWgeopVE=
            persistentKeepaliveInterval: 5s
time:
  servers: [time.example.org]
  disabled: true
  bootTimeout: 1m30s
install:
  disk: /dev/vda
  diskSelector:
    size: '>= 100GB'
    model: Samsung*
    serial: S4EWNX0
    wwid: naa.5002538d40000000
    busPath: /pci0000:00/*
    type: ssd
  image: ghcr.io/garboard-os/installer:v0.1.0
  extraKernelArgs: [console=ttyS1]
  keys: [MCowBQYDK2VwAyEAFaDFnUSiMh8dWHx3AfkxcybewkkNtyNtAWdDdFw2a4I=]
  unsigned: true
  wipe: true
disks:
  - name: data
    device: /dev/disk/by-id/virtio-data
    diskSelector:
      size: '>= 100GB'
      model: Samsung*
      serial: S4EWNX1
      wwid: naa.5002538d40000001
      busPath: /pci0000:00/*
      type: ssd
    wipe: true
    partitions:
      - {mountpoint: /var/mnt/data, size: 100GB, filesystem: ext4, encryption: {keys: [{nodeID: {}, slot: 0}, {static: {passphrase: other}, slot: 1}, {kms: {endpoint: "https://kms:8443", ca: CRT}, slot: 2}]}}
      - {mountpoint: /var/mnt/rest}
kubelet:
  image: ghcr.io/garboard-os/kubelet:v1.35.4
  extraArgs: {v: 4, fail-swap-on: false, text: "1", several: [a, 2, null]}
  nodeLabels: {example.org/rack: "12"}
  clusterDNS: [10.96.0.53]
  nodeIP:
    validSubnets: [10.0.0.0/8]
  nodeTaints: {example.org/gpu: "yes:NoExecute", other: NoSchedule}
  extraMounts: [{hostPath: /var/mnt, mountPath: /var/mnt, readonly: true}]
  persist: [cni, volumePlugins]
registries:
  mirrors:
    '*':
      endpoints: ["http://10.5.0.1:6000/"]
    docker.io:
      endpoints: ["https://one/v2", "https://two/v2/hub"]
      overridePath: true
      skipFallback: true
  config:
    one:
      auth: {username: me, password: secret}
    two:
      auth: {auth: bWU6c2VjcmV0}
      tls: {insecureSkipVerify: true, ca: CRT, clientIdentity: {crt: CRT, key: KEY}}
    three:5000:
      auth: {identityToken: abc}
    '*':
      tls: {insecureSkipVerify: true}
sysfs: {block/sda/queue/scheduler: none}
udev: {rules: ['KERNEL=="sd*", ATTR{queue/scheduler}="none"']}
kernel:
  modules: [{name: nvme_tcp}, {name: brd, parameters: [rd_nr=2, rd_size=1024]}]
images:
  verify:
    - {prefix: ghcr.io/garboard-os/, keys: [LS0tLS1CRUdJTiBQVUJMSUMgS0VZLS0tLS0KTUZrd0V3WUhLb1pJemowQ0FRWUlLb1pJemowREFRY0RRZ0FFb1J4cEs4TFd2WldkK3M4VFR3d2ViT1BvNHkxMwpWaXptclN5ZzhQR2lUKzB4aEZaa0dFSk5MakVqWVFrUjh1R0NBM3ZMcWRrdFF5MXFyUnpzaUFXcVl3PT0KLS0tLS1FTkQgUFVCTElDIEtFWS0tLS0tCg==]}
    - {prefix: '*', pods: true, authority: CRT, identity: releng@example.org}
    - {prefix: registry.k8s.io/, pods: true, authority: CRT, identity: releng@example.org}
files:
  - content: |
      [metrics]
        address = "0.0.0.0:11234"
    path: /var/cri/conf.d/metrics.toml
    op: create
    public: true
  - {content: "x\n", permissions: 0600, path: /etc/x, op: append}
env:
  http_proxy: http://proxy:3128
sysctls:
  vm.max_map_count: 262144
systemDiskEncryption:
  state:
    keys: [{nodeID: {}, slot: 0}, {static: {passphrase: other}, slot: 2}, {kms: {endpoint: "https://kms:8443", ca: CRT}, slot: 3}, {tpm: {}, slot: 4}]
  ephemeral:
    keys: [{static: {passphrase: supersecret}, slot: 1}, {nodeID: {}, slot: 31}, {kms: {endpoint: "https://kms:8443", ca: CRT}, slot: 3}, {tpm: {}, slot: 0}]
logging:
  destinations: [{endpoint: "tls://logs.example.org:6514", format: rfc5424, extraTags: {rack: "12"}}]
metrics: {address: "10.0.0.201:9100", clientCA: CRT}
console: {disabled: [network, reboot, shutdown]}
`

const fullCluster = `controlPlane:
  endpoint: https://cluster.example.org:443
  localAPIServerPort: 7443
network:
  cni:
    name: custom
    urls: [https://example.org/cni.yaml]
    flannel: {image: "ghcr.io/flannel-io/flannel:v1"}
  policies: true
  policyAgent: {image: "registry.k8s.io/networking/kube-network-policies:v1"}
  dnsDomain: k8s.example.org
  podSubnets: [10.1.0.0/16, "fd00:1::/56"]
  serviceSubnets: [10.2.0.0/16, "fd00:2::/112"]
proxy: {image: "registry.k8s.io/kube-proxy:v1", mode: iptables, disabled: true, extraArgs: {v: 2}}
coreDNS: {image: "registry.k8s.io/coredns:v1", disabled: true}
apiServer:
  image: registry.k8s.io/kube-apiserver:v1
  certSANs: ["*.example.org"]
  extraArgs: {v: 2}
  extraVolumes: [{hostPath: /a, mountPath: /b, readonly: true}]
  auditPolicy: {kind: Policy, apiVersion: audit.k8s.io/v1, omitStages: [RequestReceived], rules: [{level: None, users: ["12"], nonResourceURLs: ["/healthz*"]}, {level: Metadata}]}
  admissionControl: [{name: EventRateLimit, configuration: {limits: [{type: Server, qps: 50, on: true, off: null, x: 1.5, "1": 0x10, t: 2001-01-01, s: "yes"}]}}]
controllerManager:
  image: registry.k8s.io/kube-controller-manager:v1
  extraArgs: {v: 2}
  extraVolumes: [{hostPath: /a, mountPath: /b, readonly: true}]
scheduler:
  image: registry.k8s.io/kube-scheduler@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
  extraArgs: {v: 2}
  extraVolumes: [{hostPath: /a, mountPath: /b, readonly: true}]
extraManifests: [https://example.org/extra.yaml]
inlineManifests: [{name: one, contents: "kind: ConfigMap\n"}]
allowSchedulingOnControlPlanes: true
`

// full is a document that uses every field.
func full(t testing.TB) string {
	t.Helper()
	s := testSecrets()
	pem := func(data []byte) string { return encodePEM(data) }
	pair := func(p CertKey) string { return fmt.Sprintf("{crt: %s, key: %s}", pem(p.Crt), pem(p.Key)) }
	doc := fmt.Sprintf(`version: v1alpha1
persist: false
machine:
  type: controlplane
  token: %s
  ca: %s
  acceptedCAs: [%s]
cluster:
  clusterName: big
  id: garboard
  secret: %s
  acceptedSecrets: [AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=]
  token: %s
  ca: %s
  acceptedCAs: [%s]
  aggregatorCA: %s
  acceptedAggregatorCAs: [%s]
  serviceAccount: {key: %s, acceptedKeys: [%s]}
  etcd: {ca: %s, acceptedCAs: [%s], image: "registry.k8s.io/etcd:3", extraArgs: {quota-backend-bytes: 8000000000}}
`, string(s.MachineToken), pair(s.MachineCA), pair(s.EtcdCA), string(s.ClusterSecret), string(s.BootstrapToken),
		pair(s.KubernetesCA), pair(s.EtcdCA), pair(s.AggregatorCA), pair(s.EtcdCA), pem(s.ServiceAccount), pem(s.EtcdCA.Key), pair(s.EtcdCA), pair(s.MachineCA))
	machine := strings.NewReplacer("CRT", pem(s.EtcdCA.Crt), "KEY", pem(s.EtcdCA.Key)).Replace(fullMachine)
	return with(with(doc, "machine", machine), "cluster", fullCluster)
}

// S-050 to S-078
func TestEveryField(t *testing.T) {
	c, _, problems := load(t, full(t))
	if problems != nil {
		t.Fatal(strings.Join(problems, "\n"))
	}
	set := map[string]bool{}
	walk(reflect.ValueOf(c).Elem(), "", set)
	all := map[string]bool{}
	fields(reflect.TypeFor[Config](), "", all)
	for name := range all {
		if !set[name] && name != ".machine.disks.partitions.encryption.keys.tpm" { // it is refused there
			t.Errorf("the full document doesn't use %s", name)
		}
	}
	again := roundTrip(t, c)
	if !reflect.DeepEqual(c, again) {
		t.Error("Load(Encode(c)) differs from c")
	}
}

// fields lists the paths of all leaves of the schema, walk the paths of those that are set.
func fields(t reflect.Type, prefix string, into map[string]bool) {
	inner, _ := element(t)
	if inner == nil {
		into[prefix] = true
		return
	}
	for i := range inner.NumField() {
		fields(inner.Field(i).Type, prefix+"."+inner.Field(i).Tag.Get("yaml"), into)
	}
}

func walk(v reflect.Value, prefix string, into map[string]bool) {
	inner, _ := element(v.Type())
	switch {
	case v.IsZero():
	case inner == nil:
		into[prefix] = true
	case v.Kind() == reflect.Pointer:
		walk(v.Elem(), prefix, into)
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			walk(v.Index(i), prefix, into)
		}
	case v.Kind() == reflect.Map:
		for _, key := range v.MapKeys() {
			walk(v.MapIndex(key), prefix, into)
		}
	default:
		for i := range v.NumField() {
			walk(v.Field(i), prefix+"."+v.Type().Field(i).Tag.Get("yaml"), into)
		}
	}
}

func roundTrip(t interface {
	Helper()
	Fatalf(string, ...any)
}, c *Config) *Config {
	t.Helper()
	data, err := c.Encode()
	if err != nil {
		t.Fatalf("encode: %v", err)
	}
	again, _, err := Load("encoded", data)
	if err != nil {
		t.Fatalf("load what was encoded: %v\n%s", err, data)
	}
	return again
}

func TestLoadValues(t *testing.T) {
	c, _, problems := load(t, full(t))
	if problems != nil {
		t.Fatal(problems)
	}
	got := []any{
		*c.Persist, c.Machine.Kubelet.ExtraArgs, c.Machine.Sysctls, c.Cluster.Etcd.ExtraArgs, c.Machine.Files[0].Content,
		c.Machine.Files[0].Permissions, c.Machine.Files[1].Permissions, c.Machine.Time.BootTimeout,
		c.Cluster.ControlPlane.Endpoint.Hostname(), c.Machine.Network.Interfaces[0].Routes[0], *c.Machine.SystemDiskEncryption.Ephemeral.Keys[0].Slot,
	}
	want := "[false map[fail-swap-on:[false] several:[a 2 ] text:[1] v:[4]] map[vm.max_map_count:262144] map[quota-backend-bytes:[8000000000]] [metrics]\n" +
		"  address = \"0.0.0.0:11234\"\n 0644 0600 1m30s cluster.example.org {0.0.0.0/0 10.0.0.1 7 10.0.0.201 1400 100 unicast} 1]"
	if diff := cmp.Diff(want, fmt.Sprint(got)); diff != "" {
		t.Error(diff)
	}
}
