package logship

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/logs"
)

// levels are the names of syslog(3).
var levels = []string{"emergency", "alert", "critical", "error", "warning", "notice", "info", "debug"}

// jsonLine is a line as a JSON object; its fields are config.LogFields and the tags.
func jsonLine(r logs.Record, host string, tags map[string]string) []byte {
	fields := make(map[string]string, len(tags)+6)
	maps.Copy(fields, tags)
	fields["time"] = r.Time.UTC().Format(time.RFC3339Nano)
	fields["host"] = host
	fields["facility"] = string(r.Facility)
	fields["service"] = r.Service
	fields["level"] = levels[min(max(r.Level, 0), len(levels)-1)]
	fields["message"] = r.Message
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(fields) // texts can always be encoded
	return bytes.TrimRight(b.Bytes(), "\n")
}

// Facilities of RFC 5424 §6.2.1.
var facilities = map[logs.Facility]int{logs.FacilityKernel: 0, logs.FacilityService: 3, logs.FacilityAudit: 13}

const (
	// tagsID names the tags in structured data. 32473 is the number of RFC 5612 for
	// organisations that have none.
	tagsID = "tags@32473"
	// Bounds of RFC 5424 §6.
	maxHost, maxApp = 255, 48
)

// rfc5424 is a line as a message of syslog. The facility is the MSGID, too.
func rfc5424(r logs.Record, host string, tags map[string]string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "<%d>1 %s %s %s - %s ", facilities[r.Facility]*8+min(max(r.Level, 0), len(levels)-1),
		r.Time.UTC().Format("2006-01-02T15:04:05.000000Z07:00"), header(host, maxHost), header(r.Service, maxApp), r.Facility)
	if len(tags) == 0 {
		b.WriteByte('-')
	} else {
		b.WriteString("[" + tagsID)
		for _, name := range slices.Sorted(maps.Keys(tags)) {
			fmt.Fprintf(&b, ` %s="%s"`, name, strings.NewReplacer(`\`, `\\`, `"`, `\"`, `]`, `\]`).Replace(strings.ToValidUTF8(tags[name], "\uFFFD")))
		}
		b.WriteByte(']')
	}
	b.WriteByte(' ')
	b.WriteString(strings.ToValidUTF8(r.Message, "\uFFFD"))
	return b.Bytes()
}

// header is a field of the header: printable ASCII without blanks, "-" if it is empty.
func header(text string, most int) string {
	text = strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return '_'
		}
		return r
	}, text)
	if text == "" {
		return "-"
	}
	return text[:min(len(text), most)]
}
