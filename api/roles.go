// Package api is the contract of the machine API: who may call what, and the
// names under which the gate and the node tell each other who calls. The
// messages and methods are in proto/, the code made of them in garboardv1/, the
// client in client/.
package api

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/garboardv1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// Port is where apid listens, on every node.
const Port = 50000

// TrustPort is where trustd listens, on control planes. What it serves isn't part of
// the machine API.
const TrustPort = 50001

// Role is what a client may do: an organisation in its certificate.
type Role string

const (
	Admin      Role = "os:admin"       // everything
	Operator   Role = "os:operator"    // reads, restarts services, reboots
	Reader     Role = "os:reader"      // reads what holds no secrets
	EtcdBackup Role = "os:etcd:backup" // takes etcd snapshots, and nothing else
	Peer       Role = "os:peer"        // another node of the cluster
)

// includes are the roles that each role has besides itself. All is decided by
// this table: a role that isn't here may do nothing.
var includes = map[Role][]Role{
	Admin:      {Operator, Reader, EtcdBackup},
	Operator:   {Reader},
	Reader:     nil,
	EtcdBackup: nil,
	Peer:       nil,
}

// Roles are all that there are.
func Roles() []Role {
	return []Role{Admin, Operator, Reader, EtcdBackup, Peer}
}

// Method is what a method's options say.
type Method struct {
	// Procedure is the path of its URL: /garboard.v1.ConfigService/Apply.
	Procedure string
	// Former is the procedure that it was in the former release; "": the same.
	Former string
	// Role is the least one that may call it; "" for nobody.
	Role Role
	// Changes and Discloses: every call is audited.
	Changes, Discloses bool
	// Peer: other nodes may call it, too.
	Peer bool
	// Maintenance: it answers while the node has no configuration.
	Maintenance bool
	// Locked: it answers while no key of the machine opens its disk.
	Locked bool
	// Streaming: it answers, or is asked, with more than one message.
	Streaming bool
	// Upload is how many bytes a caller may send; 0: what is usual.
	Upload int64
}

var methods = sync.OnceValue(func() map[string]Method {
	found := map[string]Method{}
	protoregistry.GlobalFiles.RangeFilesByPackage("garboard.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			service := f.Services().Get(i)
			if elsewhere, _ := proto.GetExtension(service.Options(), garboardv1.E_ServedBy).(string); elsewhere != "" {
				continue
			}
			for j := range service.Methods().Len() {
				m := method(service.Methods().Get(j))
				found[m.Procedure] = m
			}
		}
		return true
	})
	return found
})

func method(d protoreflect.MethodDescriptor) Method {
	get := func(x protoreflect.ExtensionType) any { return proto.GetExtension(d.Options(), x) }
	return Method{
		Procedure:   "/" + string(d.Parent().FullName()) + "/" + string(d.Name()),
		Former:      get(garboardv1.E_Former).(string),
		Role:        Role(get(garboardv1.E_Role).(string)),
		Changes:     get(garboardv1.E_Changes).(bool),
		Discloses:   get(garboardv1.E_Discloses).(bool),
		Peer:        get(garboardv1.E_Peer).(bool),
		Maintenance: get(garboardv1.E_Maintenance).(bool),
		Locked:      get(garboardv1.E_Locked).(bool),
		Streaming:   d.IsStreamingServer() || d.IsStreamingClient(),
		Upload:      int64(get(garboardv1.E_UploadMib).(uint32)) << 20,
	}
}

// Audited reports whether each call of the method is written to the audit log.
func (m Method) Audited() bool { return m.Changes || m.Discloses }

// Methods are all of the API, sorted.
func Methods() []Method {
	return slices.SortedFunc(maps.Values(methods()), func(a, b Method) int { return cmp.Compare(a.Procedure, b.Procedure) })
}

// Lookup finds a method by its procedure. What isn't there is for nobody. The
// plain-HTTP forms of reading logs (GET /v1/logs/…) and metrics (GET /metrics) count as
// LogService.Read and NodeService.Metrics.
func Lookup(procedure string) (Method, bool) {
	if strings.HasPrefix(procedure, LogsPath) {
		procedure = readLog
	}
	if procedure == MetricsPath {
		procedure = readMetrics
	}
	m, ok := methods()[procedure]
	return m, ok
}

const (
	// LogsPath is below which logs are plain NDJSON.
	LogsPath = "/v1/logs/"
	readLog  = "/garboard.v1.LogService/Read"
	// MetricsPath is where Prometheus reads the node's metrics.
	MetricsPath = "/metrics"
	readMetrics = "/garboard.v1.NodeService/Metrics"
)

// Allowed tells whether any of a certificate's organisations lets its owner call
// the method. Others than ours mean nothing.
func Allowed(m Method, organisations []string) bool {
	if _, known := includes[m.Role]; !known {
		return false
	}
	if m.Peer && slices.Contains(organisations, string(Peer)) {
		return true
	}
	for _, organisation := range organisations {
		role := Role(organisation)
		if _, known := includes[role]; known && (role == m.Role || slices.Contains(includes[role], m.Role)) {
			return true
		}
	}
	return false
}

// Headers in which the gate tells the node who calls. It removes them from what
// comes in.
const (
	HeaderPeer   = "Garboard-Peer"   // the common name in the client's certificate
	HeaderRoles  = "Garboard-Roles"  // its organisations, comma-separated
	HeaderRemote = "Garboard-Remote" // address and port
	HeaderMode   = "Garboard-Mode"   // one of the modes below
)

// Refusals is where the gate tells the node of a call that it has refused, for the audit
// log. It is no method: clients can't reach it.
const Refusals = "/refusals"

// Refusal is a call that the gate has refused, as JSON.
type Refusal struct {
	Peer, Remote string
	Roles        []string
	Procedure    string
	Code         connect.Code
	Why          string
}

// Values of HeaderMode.
const (
	ModeNormal      = "normal"
	ModeMaintenance = "maintenance" // the caller is unknown
	ModeLocked      = "locked"      // the caller is unknown
)
